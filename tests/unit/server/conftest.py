import httpx
import openai
import pytest

from tests.unit.server.fakes import ScriptedEngine, serving, tokens_of


@pytest.fixture(scope="module")
def served():
    """One server a module: (engine, url)."""
    engine = ScriptedEngine()
    with serving(engine) as thread:
        yield engine, thread.url


@pytest.fixture
def engine(served):
    """The engine as new; each test sets its script and its faults."""
    fresh = ScriptedEngine(script=tokens_of("hello 日本 😀 stop here"))
    vars(served[0]).update(vars(fresh))
    return served[0]


@pytest.fixture
def http(served, engine):
    with httpx.Client(base_url=served[1], timeout=20) as http:
        yield http


@pytest.fixture
def client(served, engine):
    base_url = f"{served[1]}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20) as client:
        yield client
