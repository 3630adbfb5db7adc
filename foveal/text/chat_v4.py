"""Conversations into prompts, as DeepSeek-V4 was trained (releases Flash, Flash-0731 and Vision-Exp).

    BOS [effort text] system ｜User｜ question ｜Assistant｜ <think> reasoning </think> answer EOS ｜User｜ ...

A prompt is a row of pieces: marks of the grammar, text, and places of pictures. Marks come from the grammar alone. All
text is literal, whoever wrote it: a role tag, a picture placeholder or `<image>` typed into a message stays plain
characters (cases C072 and C073). Where nobody spells a mark, the ids of the pieces are those of the whole prompt as one
string, because a mark splits the text in the tokenizer too. Knows no picture sizes. Source: spec 9.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from foveal.errors import CheckpointError, PromptError
from foveal.text.tokenizer import BOS, EOS, Tokenizer
from foveal.text.v4_grammar import (
    ASSISTANT,
    DSML,
    IMAGE,
    REMINDER,
    TASKS,
    THINK_END,
    THINK_START,
    USER,
)
from foveal.text.v4_prompts import Template, V4Prompts, check_effort
from foveal.text.v4_turns import (
    Block,
    Call,
    PictureSlot,
    ToolResult,
    Turn,
    V4Message,
    drop_reasoning,
    last_question,
    merge_turns,
    order_results,
    parse_turns,
)

BREAK = "\n\n"
_TEMPLATE_MARKS = {
    "dsml_token": DSML,
    "thinking_start_token": THINK_START,
    "thinking_end_token": THINK_END,
}


@dataclass(frozen=True, slots=True)
class Mark:
    """A token of the grammar, by its string."""

    token: str


Piece: TypeAlias = Mark | str | PictureSlot


@dataclass(frozen=True, slots=True, eq=False)
class V4Chat:
    """A conversation as pieces: marks, texts, places of pictures."""

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The prompt as the released code shows it, a placeholder for each picture. For reading, not for encoding."""
        return IMAGE.join(self.segments)

    @property
    def segments(self) -> list[str]:
        """The text around the pictures: one string more than there are pictures."""
        segments = [""]
        for piece in self.pieces:
            if isinstance(piece, PictureSlot):
                segments.append("")
            else:
                segments[-1] += piece.token if isinstance(piece, Mark) else piece
        return segments

    @property
    def pictures(self) -> list[object]:
        """What the messages held at the places of pictures, in the order of the prompt."""
        return [piece.source for piece in self.pieces if isinstance(piece, PictureSlot)]


def encode_v4_messages(
    messages: Sequence[V4Message],
    *,
    thinking: bool = False,
    effort: str | None = None,
    drop_thinking: bool = True,
    context: Sequence[V4Message] = (),
    adds_bos: bool = True,
    prompts: V4Prompts | None = None,
    rejects_placeholders: bool = False,
) -> V4Chat:
    """The prompt of a chat, up to the point where the model's answer begins.

    Messages are objects in the OpenAI shape, or `Message`; system and developer messages may bring `tools` and
    `response_format`, any message a `task`. `effort` matters with `thinking` only. `drop_thinking` leaves out what
    earlier answers thought, unless tools are in play. `context` is conversation that an earlier prompt holds already:
    it counts and is not written again. `prompts` are the texts of the model's folder, for effort, tools and formats.
    `rejects_placeholders` refuses text that spells the picture placeholder, as the released code does.

    Raises PromptError for messages that do not fit, and what `V4Prompts` raises for texts that are missing.
    """
    if not messages:
        raise PromptError("messages must be a non-empty list of {'role': ..., 'content': ...}")
    check_effort(effort)
    turns = _turns(messages, context, rejects_placeholders)
    texts = V4Prompts() if prompts is None else prompts
    is_dropping = drop_thinking and not any(turn.schemas for turn in turns)
    if thinking and is_dropping:
        turns = drop_reasoning(turns)
    writer = _Writer(turns, texts, thinking, is_dropping)
    effort_text = texts.effort_text(effort) if thinking else ""
    if not context:
        writer.pieces += [Mark(BOS)] * adds_bos + [effort_text]
    for i, turn in enumerate(turns):
        if not turn.is_context:
            writer.write(i, turn)
    return V4Chat(tuple(_joined(writer.pieces)))


def _turns(
    messages: Sequence[V4Message], context: Sequence[V4Message], rejects_placeholders: bool
) -> list[Turn]:
    """All turns in order. Earlier context and new messages are never merged into one turn."""
    sources = (("context", context), ("messages", messages))
    turns: list[Turn] = []
    for name, source in sources:
        parsed = parse_turns(source, name=name, rejects_placeholders=rejects_placeholders)
        turns += merge_turns(parsed, is_context=name == "context")
    return order_results(turns)


class _Writer:
    """Writes turns as pieces; the rules that look at a turn's neighbours are here."""

    def __init__(
        self, turns: Sequence[Turn], prompts: V4Prompts, thinking: bool, is_dropping: bool
    ) -> None:
        self._turns, self._prompts = turns, prompts
        self._thinking, self._is_dropping = thinking, is_dropping
        self._last_question = last_question(turns)
        self.pieces: list[Piece] = []

    def write(self, i: int, turn: Turn) -> None:
        if turn.role in ("user", "developer"):
            self.pieces.append(Mark(USER))
        elif turn.role == "latest_reminder":
            self.pieces.append(Mark(REMINDER))
        elif turn.role == "assistant" and self._shows_reasoning(i):
            self.pieces += [turn.reasoning, Mark(THINK_END)]
        self.pieces += _block_pieces(turn.blocks)
        self.pieces += self._section_pieces(turn)
        if turn.role == "assistant":
            self.pieces += _call_pieces(turn.calls)
            self.pieces += [] if turn.is_open else [Mark(EOS)]
        if self._is_answered(i):
            self.pieces += self._transition(i, turn)

    def _shows_reasoning(self, i: int) -> bool:
        """Whether the answer at `i` begins inside a thought. The question before it has opened that thought."""
        follows_task = i > 0 and self._turns[i - 1].task is not None
        is_kept = not self._is_dropping or i > self._last_question
        return self._thinking and is_kept and not follows_task

    def _is_answered(self, i: int) -> bool:
        is_last = i + 1 == len(self._turns)
        return is_last or self._turns[i + 1].role in ("assistant", "latest_reminder")

    def _transition(self, i: int, turn: Turn) -> list[Piece]:
        """What hands over to the model after a turn."""
        if turn.task == "action":
            think = THINK_START if self._thinking else THINK_END
            return [Mark(ASSISTANT), Mark(think), Mark(TASKS["action"])]
        if turn.task is not None:
            return [Mark(TASKS[turn.task])]
        if turn.role not in ("user", "developer"):
            return []
        is_kept = not self._is_dropping or i >= self._last_question
        think = THINK_START if self._thinking and is_kept else THINK_END
        return [Mark(ASSISTANT), Mark(think)]

    def _section_pieces(self, turn: Turn) -> list[Piece]:
        """Tools and response format, after the text of a system or developer turn."""
        pieces: list[Piece] = []
        if turn.schemas:
            template = self._prompts.tools_template()
            pieces += [BREAK, *_filled(template, "\n".join(turn.schemas))]
        if turn.response_format is not None:
            template = self._prompts.response_format_template()
            pieces += [BREAK, *_filled(template, turn.response_format)]
        return pieces


def _filled(template: Template, value: str) -> list[Piece]:
    """A template with marks for the fields that name one, and `value` for the other field."""
    pieces: list[Piece] = []
    for literal, field in template:
        pieces.append(literal)
        if field is not None:
            token = _TEMPLATE_MARKS.get(field)
            pieces.append(value if token is None else Mark(token))
    return pieces


def _block_pieces(blocks: Iterable[Block]) -> list[Piece]:
    pieces: list[Piece] = []
    for i, block in enumerate(blocks):
        pieces += [BREAK] if i else []
        if isinstance(block, ToolResult):
            pieces += ["<tool_result>", *_block_pieces(block.parts), "</tool_result>"]
        else:
            pieces.append(block)
    return pieces


def _call_pieces(calls: Sequence[Call]) -> list[Piece]:
    """The call block. A call without arguments has an empty line where they would be, as in the released code."""
    if not calls:
        return []
    pieces: list[Piece] = [BREAK + "<", Mark(DSML), "tool_calls>\n"]
    for call in calls:
        pieces += ["<", Mark(DSML), f'invoke name="{call.name}">\n']
        for i, parameter in enumerate(call.parameters):
            is_string = "true" if parameter.is_string else "false"
            pieces += ["\n" if i else "", "<", Mark(DSML)]
            pieces += [f'parameter name="{parameter.name}" string="{is_string}">{parameter.value}']
            pieces += ["</", Mark(DSML), "parameter>"]
        pieces += ["\n</", Mark(DSML), "invoke>\n"]
    return [*pieces, "</", Mark(DSML), "tool_calls>"]


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbouring texts as one, so that the tokenizer sees what it would see in the whole string."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str) and isinstance(last, str):
            joined[-1] = last + piece
        elif piece != "":
            joined.append(piece)
    return joined


# --- ids ----------------------------------------------------------------------------------------


def encode_pieces(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    *,
    keep: Collection[str] = (),
    spells_missing: bool = False,
) -> list[list[int]]:
    """Ids around the pictures: n pictures give n + 1 lists.

    `keep` are tokens outside the grammar that count where text spells them, as the grounding tags of a model trained
    with them. Raises CheckpointError for a mark that the tokenizer lacks; with `spells_missing` its spelling is encoded
    as text instead, as encoding the whole string would do.
    """
    lists: list[list[int]] = [[]]
    for piece in _joined(_known(pieces, tokenizer, spells_missing)):
        if isinstance(piece, PictureSlot):
            lists.append([])
        elif isinstance(piece, Mark):
            lists[-1].append(tokenizer.token_id(piece.token))
        else:
            lists[-1] += tokenizer.encode_literal(piece, keep)
    return lists


def encode_v4_prompt(prompt: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of a ready prompt string, in which spelled-out marks count and `<｜deepseek_image｜>` marks a picture.

    Begin of sequence comes first exactly once, whether or not the string spells it.
    """
    lists = [tokenizer.encode(text) for text in prompt.removeprefix(BOS).split(IMAGE)]
    lists[0].insert(0, tokenizer.token_id(BOS))
    return lists


def _known(pieces: Iterable[Piece], tokenizer: Tokenizer, spells_missing: bool) -> Iterable[Piece]:
    for piece in pieces:
        if spells_missing and isinstance(piece, Mark) and not _has(tokenizer, piece.token):
            yield piece.token
        else:
            yield piece


def _has(tokenizer: Tokenizer, token: str) -> bool:
    try:
        tokenizer.token_id(token)
    except CheckpointError:
        return False
    return True
