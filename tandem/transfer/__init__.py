"""How state moves between engines: layouts, plans, the side channel, agents. No torch."""
