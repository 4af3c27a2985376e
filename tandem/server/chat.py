"""The messages of a chat request, made plain for a chat template: a role and a text each."""

from typing import Any

from tandem.server.api_error import ApiError

_SERVED = frozenset({"role", "content", "name"})
# Clients send an earlier answer back as they got it, with these empty.
_EMPTY_ONLY = frozenset(
    {"tool_calls", "function_call", "tool_call_id", "refusal", "audio", "annotations"}
)


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with `content` as one text; parts of type text are joined by line breaks.

    Raises: ApiError naming the message and the part that is not served.
    """
    if not messages:
        raise ApiError("messages is empty; expected at least one message", param="messages")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    plain = {}
    for name, value in message.items():
        if name in _SERVED:
            if value is not None:
                plain[name] = value
        elif name not in _EMPTY_ONLY or value:
            raise ApiError(f"{where}.{name} is not supported; remove it", param="messages")
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(f"{where}.role is {role!r}; expected a text", param="messages")
    if "name" in plain and not isinstance(plain["name"], str):
        raise ApiError(f"{where}.name is not a text", param="messages")
    plain["content"] = _plain_content(where, plain.get("content"))
    return plain


def _plain_content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(
            f"{where}.content is {type(content).__name__}; expected a text or a list of text parts",
            param="messages",
        )
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                f"{where}.content[{place}] is of type {kind!r}; only parts "
                '{"type": "text", "text": ...} are supported',
                param="messages",
            )
        texts.append(part["text"])
    return "\n".join(texts)
