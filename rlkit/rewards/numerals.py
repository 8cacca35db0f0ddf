r"""Read numbers from text: the grammar of `NumericMatch`.

A number is, with an optional sign and currency sign before it,

- `7`, `3.50`, `.5`, `5.`, `1,234,567` (also `1,00,000`, `1{,}234`, `1\,234`, `1_234`, a thin space);
- a fraction: `3/4`, `\frac{3}{4}`, `\frac34`; a mixed one: `1 1/2`, `1½`, `2\frac{1}{2}`;
- with an exponent: `1.5e-3`, `1.5 \times 10^{-3}`, `10^5`.

A unit after it is ignored: words (`5 million` is 5), and a per cent sign (50% is 50). A full stop ends a sentence.
`12-34` has no sign in it, `2 - -3` has. The minus may be any of Unicode's, digits may be full-width.

Not numbers: a power (`2^{10}`), a root, a multiple of pi or of a root, a fraction of other things, a date, a time, a
version. Digits within a word (`H2O`, `x_1`) are part of the word. Not read: decimal commas, numerals in words.
"""

import math
import re
import unicodedata
from collections.abc import Iterator

_ASCII = str.maketrans("\u2212\u2010\u2011\u2013\ufe63\u2044\u2215", "-----//")
_WIDE = re.compile("([¼-¾⅐-⅞])|[！-～]")  # vulgar fractions, full-width ASCII
_SEPARATOR = re.compile(r"(?<=\d)(?:\\[,;:! ]|\{,\}|[_\u00a0\u2009\u202f])(?=\d{3}(?!\d))", re.ASCII)
_RELATION = re.compile(r"=|≈|\\approx\b")

_PLAIN = r"(?:\d{1,3}(?:,\d{2,3}){0,12},\d{3}(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\w.])\.\d+)"
_BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"  # two levels; what is deeper is not a number either
_TIMES = r"(?:\\times|\\cdot|[×x*·])"
_TOKEN = re.compile(
    rf"""
      (?P<word>(?!sqrt\b)(?!(?<=\d)x\d)[A-Za-z](?:\w*\d(?:\.\d+)*|\w*))
    | (?P<index>(?<=[A-Za-z)\]}}])[_^]\s?(?:{_BRACES}|[-+]?\w+))
    | (?P<date>\d{{4}}-\d\d-\d\d(?!\d))
    | (?P<number>
        (?P<sign>(?:(?<![\w)\]}}])[-+])?) (?:\\?[$€£¥₹]\s?(?P<late_sign>[-+]?))?
        (?:
            (?P<whole>\d+)?\s?\\[dtc]?frac\s?(?:
                \{{\s?(?P<top>[-+]?{_PLAIN})\s?\}}\s?\{{\s?(?P<bottom>{_PLAIN})\s?\}} | (?P<short>\d\s?\d))
          | (?P<units>\d+)[ \t](?P<part>\d+)/(?P<of>\d+)(?![\d./])
          | (?P<upper>{_PLAIN})\s?/\s?(?P<lower>{_PLAIN})
          | (?:(?P<mantissa>{_PLAIN})\s?{_TIMES}\s?)?
            10\s?\^\s?(?P<power>[-+]?\d{{1,3}}(?!\d)|\{{\s?[-+]?\d{{1,3}}\s?\}})
          | (?P<plain>{_PLAIN}(?:[eE][-+]?\d{{1,3}}(?!\w|\.\d))?)
        )
        (?! \.?\d | \s?/\s?\d | :\d | \s?\^ | \*\*[-+]?\d | [⁰¹²³⁴-⁹]
          | \s?(?:\\?pi\b|π|√|\\?sqrt|\\infty|∞|\\[dtc]?frac))
      )
    | (?P<more>
        {_PLAIN}\s?(?:\^|\*\*)\s?(?:{_BRACES}|[-+]?\w+)? | \d+(?:[.:]\d+|\s?/\s?\d+)+ | \d+
      | \\?sqrt\s?(?:\[\w*\])?\s?(?:{_BRACES}|\(\w*\)|\d+)? | √\s?\(?\d*
      | \\[dtc]?frac\s?(?:{_BRACES}\s?(?:{_BRACES}|\w)?)? | \\pi\b | π | \\infty\b | ∞
      )
    """,
    re.VERBOSE | re.ASCII,
)


def last_number(text: str) -> float | None:
    r"""The last number in a text; None if there is none, or it is part of something larger such as a power.

    Example:
        >>> (
        ...     last_number("from 3 to -1,250.5 and back"),
        ...     last_number("12-34"),
        ...     last_number("so 3/4."),
        ...     last_number(r"5\pi"),
        ... )
        (-1250.5, 34.0, 0.75, None)
    """
    return next(reversed(list(_values(text))), None)


def only_number(text: str) -> float | None:
    r"""The only number in a text, or after its last equals sign; None if there is none or more than one.

    Example:
        >>> only_number("x = 7 dollars"), only_number("3 or 4"), only_number(r"\frac{1}{2}"), only_number(r"2\sqrt{3}")
        (7.0, None, 0.5, None)
    """
    values = list(_values(_RELATION.split(text)[-1]))
    return values[0] if len(values) == 1 else None


def _values(text: str) -> Iterator[float | None]:
    """The numbers of a text in their order; None for a number that is part of something larger."""
    text = _WIDE.sub(lambda match: " " * bool(match[1]) + unicodedata.normalize("NFKC", match[0]), text)
    for match in _TOKEN.finditer(_SEPARATOR.sub("", text.translate(_ASCII))):
        if match["number"]:
            yield _value(match)
        elif match["more"] or match["date"]:
            yield None


def _value(match: re.Match[str]) -> float | None:
    whole, top, bottom = match["units"] or match["whole"], match["part"] or match["top"], match["of"] or match["bottom"]
    if match["short"]:
        top, bottom = match["short"][0], match["short"][-1]
    if match["upper"]:
        top, bottom = match["upper"], match["lower"]
    if top is None:
        power = int((match["power"] or "0").strip("{} \t\n"))
        value = _plain(match["plain"] or match["mantissa"] or "1") * float(f"1e{power}")  # 10.0**999 would raise
    else:
        above, below = _plain(top), _plain(bottom)
        if not below or (whole and not 0 < above < below):  # 2\frac{3}{2} is a product
            return None
        value = above / below + (_plain(whole) if whole else 0.0)
    negative = "-" in (match["sign"], match["late_sign"])
    return (-value if negative else value) if math.isfinite(value) else None


def _plain(text: str) -> float:
    return float(text.replace(",", ""))
