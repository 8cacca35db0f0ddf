"""Facts about the lines of a cell that only its tokens show, not the syntax tree."""

import io
import tokenize
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Facts about lines, counted from 1."""

    ends: dict[int, int]  # the last line of the logical line that a line belongs to; a backslash joins the next line
    inside_strings: frozenset[int]  # lines that begin inside a string, which indenting would change
    comments: dict[int, str]  # the comment on a line, with its marks

    @property
    def allowed(self) -> dict[int, frozenset[str]]:
        """Warnings that a comment `# rlkit: ok W203` silences, by line."""
        found = {line: text.partition("rlkit: ok")[2].replace(",", " ") for line, text in self.comments.items()}
        return {line: frozenset(codes.split()) for line, codes in found.items() if codes}


def read_layout(source: str) -> Layout:
    """Read the tokens of a cell in plain Python."""
    ends: dict[int, int] = {}
    inside: set[int] = set()
    comments: dict[int, str] = {}
    opened: list[int] = []
    first = 1
    for token in tokenize.generate_tokens(io.StringIO(source + "\n\n").readline):
        name, line = tokenize.tok_name[token.type], token.start[0]
        if name in ("NEWLINE", "NL", "ENDMARKER"):
            ends |= dict.fromkeys(range(first, line + 1), line)
            first = line + 1
        elif name == "COMMENT":
            comments[line] = token.string
        elif name in ("FSTRING_START", "TSTRING_START"):
            opened.append(line)
        elif name in ("STRING", "FSTRING_END", "TSTRING_END"):
            inside.update(range((line if name == "STRING" else opened.pop()) + 1, token.end[0] + 1))
    return Layout(ends, frozenset(inside), comments)
