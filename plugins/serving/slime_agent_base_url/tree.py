"""The messages of a session as a tree, in which every sampled assistant message holds its sampled turn.

`sessions.Session` finds a request's messages in the tree before generation, and then adds the answer. `linearise` turns
the finished tree into trajectories::

    [tools] -- system -- user -- assistant* -- tool -- assistant*        * holds a Turn
                            |                     `--- assistant*          asked twice: a branch
                            `--- user -- assistant*                        a sub-agent with the same system prompt

The tree decides which *messages* belong together. `linearise` decides which *tokens* do, from the turns alone: a client
may rewrite a message and still be in the same conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slime_serving.front.answer import finish_of
from slime_serving.front.wanted import Message

from slime_core.sample import GenerationOutput
from slime_core.sample.provenance import Source


class Key(NamedTuple):
    """Identity of a message: two messages with equal keys are the same message.

    Two assistant messages are the same if content and calls are equal; ids of calls and white space around the text are
    ignored. A client may omit the reasoning of earlier turns; reasoning that it sends must equal the sampled reasoning.
    """

    role: str
    content: str
    calls: str = ""
    """Names and arguments, as canonical JSON."""


def key_of(message: Mapping[str, Any]) -> Key:
    """Return the key of a message."""
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
    """Return JSON text that is equal for equal values."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


@dataclass
class Rendering:
    """The template's output for a conversation: text and token ids."""

    text: str
    ids: list[int]


@dataclass
class Prompt:
    """The ids of one request. A turn keeps its prompt, so a prompt stores only ids that no earlier turn stores."""

    begun: list[int]
    """Ids of a prompt that was rendered as a whole; empty with `held`."""
    held: Turn | None = None
    """The turn whose prompt and answer the ids begin with."""
    new: list[tuple[list[int], Source]] = field(default_factory=list)
    """Ids after the held turn, with their sources; empty without `held`."""
    noted: dict[str, Any] = field(default_factory=dict)
    """Metadata from `quoted` for a sample that ends with this prompt's answer."""
    drifted: bool = False
    """True if the template would render other tokens than the held ones."""
    rendering: Rendering | None = field(default=None, repr=False)
    """Rendering for the next prompt of the conversation, which moves it there: one per conversation, not per turn."""

    @property
    def ids(self) -> list[int]:
        """All ids, joined into a new list."""
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
    """An answer of the engine, with its prompt."""

    prompt: Prompt
    output: GenerationOutput
    ill_formed: int = 0
    """Number of tool calls that could not be parsed."""
    tool_calls: int = 0
    number: int = 0
    """Order within the session, from 0."""
    route: tuple[Key, ...] = ()
    """Keys of the messages of its request, as the client sent them."""

    @property
    def finish(self) -> str:
        """Finish reason, "stop" or "length"."""
        return finish_of(self.output)


@dataclass(eq=False)
class Node:
    """A message in the tree. The root holds no message of the conversation."""

    message: Message
    key: Key
    parent: Node | None = None
    turn: Turn | None = None
    """The sampled turn; None for a message that the client wrote."""
    children: list[Node] = field(default_factory=list)
    other_keys: set[Key] = field(default_factory=set)
    """Rewritten spellings of this message that clients sent back (`merge_rewritten`)."""
    delivered: bool = True
    """False for an answer that the client may never have received."""

    @property
    def is_generated_leaf(self) -> bool:
        """True for a sampled message without a later message."""
        return self.turn is not None and not self.children


@dataclass(frozen=True)
class Place:
    """Position of a request's messages in the tree."""

    root: Node
    nodes: tuple[Node, ...]
    """Nodes of the known messages, in order."""
    keys: tuple[Key, ...]
    """Keys of all messages of the request."""

    @property
    def known(self) -> int:
        """Number of known messages."""
        return len(self.nodes)

    @property
    def last(self) -> Node:
        """Deepest known node; the root if no message is known."""
        return self.nodes[-1] if self.nodes else self.root

    @property
    def held(self) -> tuple[int, Turn] | None:
        """(message index, turn) of the last sampled message whose turn's prompt the request repeats word for word. The
        request's tokens begin with that turn's tokens."""
        for index in range(len(self.nodes) - 1, -1, -1):
            turn, node = self.nodes[index].turn, self.nodes[index]
            if turn is not None and self.keys[index] == node.key and turn.route == self.keys[:index]:
                return index, turn
        return None


class MessageTree:
    """All conversations of one session."""

    def __init__(self, *, rewrite_threshold: int) -> None:
        """`rewrite_threshold`: a client may rewrite an answer of fewer tokens without making a branch."""
        self.rewrite_threshold = rewrite_threshold
        self.rewritten = 0
        """Number of rewritten answers that were treated as the same message."""
        self._roots: dict[str, Node] = {}
        self._count = 0

    def find(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Place:
        """Walk down as far as the messages are known. Other tools have another root: tools are part of the prompt."""
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
                keys[index] = child.key  # share one object, since routes are compared at every request
            nodes.append(child)
            node = child
        return Place(root, tuple(nodes), tuple(keys))

    @staticmethod
    def _child(node: Node, message: Message, key: Key) -> Node | None:
        for child in reversed(node.children):  # of equal answers, the client continues with the last
            if (key == child.key or key in child.other_keys) and (
                child.turn is None or same_reasoning(child.message, message)
            ):
                return child
        return None

    def _rewritten_child(self, node: Node, key: Key) -> Node | None:
        """Return the only child if it is a short answer without later messages: the client has rewritten it."""
        if key.role != "assistant" or len(node.children) != 1:
            return None
        (child,) = node.children
        if child.turn is None or child.children or len(child.turn.output.token_ids) >= self.rewrite_threshold:
            return None
        return child

    def add(self, place: Place, messages: Sequence[Message], answer: Message, turn: Turn) -> Node:
        """Add the answer to `messages`, which `find` put at `place`, as a new node that is not `delivered` yet."""
        node = place.last
        for old in place.nodes:  # another request, whose client left, may have been forgotten meanwhile
            if old.parent is not None and old not in old.parent.children:
                old.parent.children.append(old)
        for old, key in zip(place.nodes, place.keys):
            if key is not old.key and key not in old.other_keys:
                old.other_keys.add(key)
                self.rewritten += 1
        for message, key in zip(messages[place.known :], place.keys[place.known :]):
            node = self._grow(node, Node(dict(message), key))
        turn.number, turn.route = self._count, place.keys
        if turn.prompt.held is not None:
            turn.prompt.held.prompt.rendering = None  # this turn's rendering is closer to the next prompt
        self._count += 1
        return self._grow(node, Node(answer, key_of(answer), turn=turn, delivered=False))

    @staticmethod
    def _grow(node: Node, child: Node) -> Node:
        child.parent = node
        node.children.append(child)
        return child

    def forget(self, node: Node) -> None:
        """Remove an answer that the client never received; keep it if a later request shows that it was received."""
        while node.parent is not None and not node.children:
            parent = node.parent
            parent.children.remove(node)
            if parent.turn is not None:
                return
            node = parent

    def paths(self) -> Iterator[list[Turn]]:
        """Yield the turns from each root to each last sampled message, in the order of sampling."""
        found = [path for root in self._roots.values() for path in _paths(root)]
        yield from sorted(found, key=lambda path: path[-1].number)


def _paths(root: Node) -> Iterator[list[Turn]]:
    """Walk depth first, without recursion, so that conversations may have thousands of messages."""
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
