"""`rlkit report`: one HTML file with charts, completions and token lens of runs, for a colleague without rlkit.

Everything is inside: plotly's library, the figure, the panel's JavaScript and the answers it can give. So it opens
from a mail or a disk without a network. It is bounded: of long runs the newest steps are in it, and it says what was
left out.

Everything that comes from a run is JSON inside `<script type="application/json">` with "<" escaped, so a completion
that spells `</script>` stays text.
"""

import html
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlkit.run.reader import RunReader
from rlkit.support.files import written_whole
from rlkit.support.text import as_html, visible
from rlkit.view.charts import Charts
from rlkit.view.javascript import script, style
from rlkit.view.panels import History
from rlkit.view.static import headline

MAX_BYTES = 8_000_000  # of completions

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:;
script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font-family: system-ui, sans-serif; margin: 1.2rem auto; max-width: 1180px; padding: 0 1rem; }}
h1 {{ font-size: 1.15rem; margin: 0 0 .3rem; }}
p {{ margin: .2rem 0; color: #777; font-size: .85rem; }}
{css}
</style>
</head>
<body>
<h1>{title}</h1>
{lines}
<div id="charts"></div>
<div id="panel"></div>
<p>{note}</p>
<script>{plotly}</script>
<script type="application/json" id="figure">{figure}</script>
<script type="application/json" id="bundle">{bundle}</script>
<script type="application/json" id="code">{code}</script>
<script>
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const figure = read("figure");
Plotly.newPlot("charts", figure.data, figure.layout, {{ responsive: true, displaylogo: false }});
const code = URL.createObjectURL(new Blob([read("code")], {{ type: "text/javascript" }}));
import(code).then((panel) => panel.mount(document.getElementById("panel"), panel.bundled(read("bundle"))));
</script>
</body>
</html>
"""


def write_report(
    runs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES
) -> Path:
    """Write the report of one or several runs.

    Args:
        runs: folders, at least one.
        output: the HTML file; its folder is made.
        max_bytes: of completions, at least 0; the newest steps come first.

    Returns:
        The file.

    Raises:
        ValueError: no run, max_bytes below 0, or a folder as the output.
        FileNotFoundError: a folder that is not a run's.
    """
    if not runs:
        raise ValueError("write_report: expected at least one folder of a run, got none.")
    if max_bytes < 0:
        raise ValueError(f"write_report: max_bytes must be at least 0, got {max_bytes}.")
    from plotly.offline import get_plotlyjs

    from rlkit.view.panel_data import bundle

    histories = [History(RunReader(run)) for run in runs]
    for history in histories:
        while history.update():
            pass
    found = bundle([history.reader for history in histories], max_bytes=max_bytes)
    notes = [f"Written by rlkit. {_left_out(found['left_out'], max_bytes)}"]
    notes += [note for history in histories for note in history.reader.notes]
    page = _PAGE.format(
        title=html.escape(visible(", ".join(history.reader.name for history in histories))),
        css=style(),
        lines="".join(f"<p>{as_html(headline(history))}</p>" for history in histories),
        note="<br>".join(as_html(note) for note in notes),
        plotly=get_plotlyjs(),
        figure=_safe(Charts(histories, live=False).figure.to_json(), encoded=True),
        bundle=_safe(found),
        code=_safe(script()),
    )
    file = Path(output)
    if file.is_dir():
        raise ValueError(f"write_report: {file} is a folder; name the file, such as {file / 'report.html'}.")
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as partial:
        partial.write_text(page, encoding="utf-8")
    return file


def _left_out(steps: int, max_bytes: int) -> str:
    if not steps:
        return "All kept steps are in it."
    limit = f"{max_bytes / 1e6:.0f} MB of completions"
    return f"{steps} older steps were left out, to stay below {limit}; rlkit view shows all."


def _safe(value: Any, *, encoded: bool = False) -> str:
    r"""JSON that can stand inside a script element: no "<", so neither `</script>` nor `<!--`.

    Example:
        >>> print(_safe("</script>"))
        "\u003c/script>"
    """
    text = value if encoded else json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
