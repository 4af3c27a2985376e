"""What a sequence leaves behind: components, their bytes, how ranks share them. No torch."""
