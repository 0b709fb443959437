"""One HTML file that draws a recording's timeline, in any browser and with no network."""

from __future__ import annotations

import base64
import html
import io
import json
import os
from pathlib import Path

from oomb.profiling.recording import Recording
from oomb.profiling.web import module_source
from oomb.whole_file import whole_file

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'">
<title>{title}</title>
<style>
  body {{ margin: 0; padding: 20px 24px; background: #fff }}
  @media (prefers-color-scheme: dark) {{ body {{ background: #16181c }} }}
</style>
</head>
<body>
<main id="timeline"></main>
<noscript>The timeline is drawn by JavaScript, which is off in this browser.</noscript>
<script type="application/octet-stream;base64" id="recording">{recording}</script>
<script type="module">
{module}
const packed = atob(document.getElementById("recording").textContent);
const bytes = new Uint8Array(packed.length);
for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
await timeline(document.getElementById("timeline"), bytes, {options});
</script>
</body>
</html>
"""


def write_html(recording: Recording, path: str | os.PathLike, title: str | None = None) -> Path:
    """Write a recording as a page of its own. The file appears whole or not at all.

    Args:
        recording: what to draw.
        path: the file to write; an existing one is replaced.
        title: heading of the page; the model and context that the recording notes by default.

    Returns:
        The path.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    import oomb

    path, title = Path(path), title or _title(recording)
    options = {"title": title, "version": oomb.__version__}
    text = _PAGE.format(
        title=html.escape(title),
        recording=base64.b64encode(_packed(recording)).decode("ascii"),
        module=module_source(),
        options=json.dumps(options).replace("</", "<\\/"),
    )
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


def _title(recording: Recording) -> str:
    """What was recorded, as far as its notes say."""
    notes = recording.header.get("notes", {})
    model, context = notes.get("model"), notes.get("context")
    if isinstance(model, dict):
        model = model.get("class")
    words = [model if isinstance(model, str) else "Timeline of a step"]
    if isinstance(context, int):
        words.append(f"{context:,} tokens")
    return ", ".join(words)


def _packed(recording: Recording) -> bytes:
    """The recording as the bytes of a `run.oomb`."""
    packed = io.BytesIO()
    recording.write(packed)
    return packed.getvalue()
