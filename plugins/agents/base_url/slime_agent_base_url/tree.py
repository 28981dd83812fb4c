"""The messages of a session as a tree, in which every assistant message that was sampled holds what was sampled.

`sessions.Session` looks a request's messages up here before it is answered, and adds the answer; `linearise` turns the
finished tree into trajectories::

    [tools] -- system -- user -- assistant* -- tool -- assistant*        * holds a Turn
                            |                     `--- assistant*          asked twice: a branch
                            `--- user -- assistant*                        a sub-agent with the same system prompt

The tree says which *messages* go together. Which *tokens* do is `linearise`'s question, answered from the turns alone:
a client may rewrite a message and still be in the same conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slime_command_serve.front.answer import finish_of
from slime_command_serve.front.wanted import Message

from slime_core.provenance import Source
from slime_core.types import GenerationOutput


class Key(NamedTuple):
    """What two messages have in common when they are the same message.

    Two assistant messages are, when content and calls are, whatever the ids of the calls and the white space around the
    text. A client may leave the reasoning of earlier turns out; what it sends of it has to be what was sampled.
    """

    role: str
    content: str
    calls: str = ""
    """Names and arguments, as canonical JSON."""


def key_of(message: Mapping[str, Any]) -> Key:
    """The key of one message."""
    content = str(message.get("content") or "")
    if message["role"] != "assistant":
        return Key(message["role"], content)
    calls = [call["function"] for call in message.get("tool_calls") or []]
    text = canonical([[c["name"], c["arguments"]] for c in calls]) if calls else ""
    return Key("assistant", content.strip(), text)


def same_reasoning(sampled: Mapping[str, Any], sent: Mapping[str, Any]) -> bool:
    """False when the client sent reasoning that is not the sampled one."""
    theirs = str(sent.get("reasoning_content") or "").strip()
    return not theirs or theirs == str(sampled.get("reasoning_content") or "").strip()


def canonical(value: Any) -> str:
    """JSON that is the same text for the same value."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


@dataclass
class Rendering:
    """What the template writes for a conversation: text, and its ids."""

    text: str
    ids: list[int]


@dataclass
class Prompt:
    """The ids of one request. A turn keeps its prompt, so only what no earlier turn of the conversation has is kept."""

    begun: list[int]
    """Rendered as a whole; empty with `held`."""
    held: Turn | None = None
    """The turn whose prompt and answer they begin with."""
    new: list[tuple[list[int], Source]] = field(default_factory=list)
    """What follows those, with its sources; empty without `held`."""
    noted: dict[str, Any] = field(default_factory=dict)
    """Of `quoted`: metadata of a sample that ends with this prompt's answer."""
    drifted: bool = False
    """The template would have written other tokens than those that are held."""
    rendering: Rendering | None = field(default=None, repr=False)
    """For the next prompt of the conversation, which takes it: there is one per conversation, not per turn."""

    @property
    def ids(self) -> list[int]:
        """All of them, put together anew."""
        pieces: list[list[int]] = []
        prompt = self
        while prompt.held is not None:
            pieces += [ids for ids, _ in reversed(prompt.new)]
            pieces.append(prompt.held.output.token_ids)
            prompt = prompt.held.prompt
        pieces.append(prompt.begun)
        whole: list[int] = []
        for piece in reversed(pieces):
            whole += piece
        return whole


@dataclass(eq=False)
class Turn:
    """One answer of the engine, with the tokens it was an answer to."""

    prompt: Prompt
    output: GenerationOutput
    ill_formed: int = 0
    """Tool calls that could not be read."""
    tool_calls: int = 0
    number: int = 0
    """Order within the session, from 0."""
    route: tuple[Key, ...] = ()
    """Keys of the messages it was an answer to, as the client sent them."""

    @property
    def finish(self) -> str:
        """ "stop" or "length"."""
        return finish_of(self.output)


@dataclass(eq=False)
class Node:
    """One message. The root of a tree of messages has none."""

    message: Message
    key: Key
    parent: Node | None = None
    turn: Turn | None = None
    """What was sampled; None for what the client wrote."""
    children: list[Node] = field(default_factory=list)
    other_keys: set[Key] = field(default_factory=set)
    """Rewritten spellings of this message that clients sent back (`merge_rewritten`)."""
    delivered: bool = True
    """False: an answer that the client may never have got."""

    @property
    def is_generated_leaf(self) -> bool:
        """Sampled, and nothing came after it."""
        return self.turn is not None and not self.children


@dataclass(frozen=True)
class Place:
    """Where a request's messages lead."""

    root: Node
    nodes: tuple[Node, ...]
    """Of the messages that are known, in order."""
    keys: tuple[Key, ...]
    """Of all messages of the request."""

    @property
    def known(self) -> int:
        """How many messages are known."""
        return len(self.nodes)

    @property
    def last(self) -> Node:
        """The deepest known node; the root when no message is known."""
        return self.nodes[-1] if self.nodes else self.root

    @property
    def held(self) -> tuple[int, Turn] | None:
        """(message index, turn) of the last sampled message up to which the request repeats what a turn was sampled
        after, word for word; the request's tokens begin with that turn's."""
        for index in range(len(self.nodes) - 1, -1, -1):
            turn, node = self.nodes[index].turn, self.nodes[index]
            if turn is not None and self.keys[index] == node.key and turn.route == self.keys[:index]:
                return index, turn
        return None


class MessageTree:
    """All conversations of one session."""

    def __init__(self, *, rewrite_threshold: int) -> None:
        """`rewrite_threshold`: an answer of fewer tokens than this may be rewritten without making a branch."""
        self.rewrite_threshold = rewrite_threshold
        self.rewritten = 0
        """Rewritten answers that were taken for the same message."""
        self._roots: dict[str, Node] = {}
        self._count = 0

    def find(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Place:
        """Walk down as far as the messages are known. Tools are part of the prompt, so other tools are another root."""
        name = canonical(list(tools))
        root = self._roots.setdefault(name, Node({}, Key("", "")))
        keys = list(map(key_of, messages))
        nodes: list[Node] = []
        node = root
        for index, message in enumerate(messages):
            key = keys[index]
            child = self._child(node, message, key) or self._rewritten_child(node, key)
            if child is None:
                break
            if key == child.key:
                keys[index] = child.key  # the same object: routes are compared at every request
            nodes.append(child)
            node = child
        return Place(root, tuple(nodes), tuple(keys))

    @staticmethod
    def _child(node: Node, message: Message, key: Key) -> Node | None:
        for child in reversed(node.children):  # of equal answers, the last is the one the client goes on with
            if (key == child.key or key in child.other_keys) and (
                child.turn is None or same_reasoning(child.message, message)
            ):
                return child
        return None

    def _rewritten_child(self, node: Node, key: Key) -> Node | None:
        """The only child, a short answer that nothing came after: the client has rewritten it."""
        if key.role != "assistant" or len(node.children) != 1:
            return None
        (child,) = node.children
        if child.turn is None or child.children or len(child.turn.output.token_ids) >= self.rewrite_threshold:
            return None
        return child

    def add(self, place: Place, messages: Sequence[Message], answer: Message, turn: Turn) -> Node:
        """The answer to `messages`, which `find` put at `place`, as a new node; it is not `delivered` yet."""
        node = place.last
        for old, key in zip(place.nodes, place.keys):
            if key is not old.key and key not in old.other_keys:
                old.other_keys.add(key)
                self.rewritten += 1
        for message, key in zip(messages[place.known :], place.keys[place.known :]):
            node = self._grow(node, Node(dict(message), key))
        turn.number, turn.route = self._count, place.keys
        if turn.prompt.held is not None:
            turn.prompt.held.prompt.rendering = None  # this turn's is nearer to whatever comes next
        self._count += 1
        return self._grow(node, Node(answer, key_of(answer), turn=turn, delivered=False))

    @staticmethod
    def _grow(node: Node, child: Node) -> Node:
        child.parent = node
        node.children.append(child)
        return child

    def forget(self, node: Node) -> None:
        """An answer that the client never got; kept when a later request shows that it did."""
        while node.parent is not None and not node.children:
            parent = node.parent
            parent.children.remove(node)
            if parent.turn is not None:
                return
            node = parent

    def paths(self) -> Iterator[list[Turn]]:
        """The turns from each root to each last sampled message, in the order in which those were sampled."""
        found = [path for root in self._roots.values() for path in _paths(root)]
        yield from sorted(found, key=lambda path: path[-1].number)


def _paths(root: Node) -> Iterator[list[Turn]]:
    """Depth first, without recursion: conversations of thousands of messages are no deeper than memory allows."""
    stack: list[tuple[Node, tuple[Turn, ...]]] = [(root, ())]
    while stack:
        node, above = stack.pop()
        turns = (*above, node.turn) if node.turn is not None else above
        if node.turn is not None and not _any_turn_below(node):
            yield list(turns)
        stack.extend((child, turns) for child in node.children)


def _any_turn_below(node: Node) -> bool:
    stack = list(node.children)
    while stack:
        child = stack.pop()
        if child.turn is not None:
            return True
        stack.extend(child.children)
    return False
