"""What ``lowbit bench rtf`` says: utterances in several scripts and lengths, behind the same references for every engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.models.omnivoice import Line, read_lines, voice_of
from lowbit.types import FormatError

REFERENCE = 5.0  # seconds of the made-up voice
# name, language, seconds, text. Lengths of one breath up to the longest single shot, and one text in chunks.
TEXTS: tuple[tuple[str, str, float, str], ...] = (
    ("en_short", "en", 2.0, "The kettle is on, come in."),
    ("en_10s", "en", 10.0, "When the last ferry had left the island, the keeper of the lighthouse walked down to the pier, counted the "
     "empty crates, and found that one of them was breathing very quietly."),
    ("en_20s", "en", 20.0, "My grandmother kept her recipes in a tin box that smelled of cloves. None of them had numbers. She wrote a "
     "handful, a little more than you think, until it looks like rain. I spent a whole winter baking the same bread, "
     "and on the first warm day of March it came out exactly as I remembered it, brown and crooked and far too salty."),
    ("vi", "vi", 6.0, "Sáng nay trời mưa nhỏ, quán cà phê đầu ngõ vẫn mở cửa và bà chủ hỏi tôi có muốn uống như mọi khi không."),
    ("zh", "zh", 7.0, "昨天晚上我们在河边等了很久，船还没有来，可是对岸的灯一盏一盏地亮了起来。"),
    ("ja", "ja", 6.0, "駅前の古い時計は五分遅れているが、町の人はみんなそれに合わせて暮らしている。"),
    ("ko", "ko", 5.0, "비가 그친 뒤에 아이들은 골목으로 뛰어나와 종이배를 띄우기 시작했다."),
    ("hi", "hi", 6.0, "पहाड़ की चोटी से गाँव छोटा दिखता है, लेकिन मंदिर की घंटी की आवाज़ यहाँ तक साफ़ सुनाई देती है।"),
    ("ar", "arb", 6.0, "جلس العجوز تحت شجرة التين يصلح شبكته، ويحكي للأولاد كيف كان البحر أقرب إلى البيوت."),
    ("ru", "ru", 8.0, "Поезд стоял на маленькой станции всего две минуты, но проводница успела купить у старика ведро яблок."),
    ("el", "el", 5.0, "Το μικρό καφενείο άνοιγε πριν ξημερώσει, για τους ψαράδες που γύριζαν στο λιμάνι."),
    ("de", "de", 9.0, "Im Keller der alten Schule stand ein Klavier, das niemand mehr stimmte, und trotzdem übte dort jeden Dienstag "
     "ein Mädchen dieselben vier Takte, bis sie leise genug waren."),
    ("en_long", "en", 48.0, "The survey began in the north, where the maps were oldest. Every stone was where it should have been, and "
     "nobody was surprised. In the second week the road turned inland. There the farms had names that were not written "
     "down anywhere, and the people who lived in them gave directions by wind and by smell. We wrote down what we heard. "
     "By the end of the month our notebook held three villages that no map had ever shown, and had lost a fourth, which "
     "had been drawn by a clerk who never left his desk. When the rain set in we stayed at an inn and compared what we "
     "had. The landlord read it over our shoulders, laughed, and crossed out his own house."),
)  # fmt: skip


class Sample(NamedTuple):
    """One utterance: ``seconds`` are asked for, and what a real-time factor divides by."""

    name: str
    line: Line
    seconds: float


def samples(
    path: str | os.PathLike[str] | None = None,
    reference: tuple[str, str] | None = None,
    most: int | None = None,
    cap: float | None = None,
) -> list[Sample]:
    """The built-in set, or the lines of a file (see ``models.omnivoice.read_lines``; they need a duration).

    ``reference``: (audio, its text) of every line that names none. ``most`` samples are kept, spread over the set;
    ``cap`` shortens each to so many seconds. FormatError for what is no sample.
    """
    given = Line("") if reference is None else Line("", Path(reference[0]), reference[1])
    if path is None:
        found = [
            Sample(name, given._replace(text=text, language=language, duration=seconds, where=name), seconds)
            for name, language, seconds, text in TEXTS
        ]
    else:
        found = []
        for number, line in enumerate(read_lines(path, given), 1):
            if line.duration is None:
                raise FormatError(f"{line.where}: duration: found nothing, accepted in a set is a number of seconds")
            found.append(Sample(f"line_{number:02}", line, line.duration))
    if most is not None and most < len(found):
        found = [found[i * len(found) // most] for i in range(most)]
    if cap is not None:
        found = [_capped(sample, cap) for sample in found]
    return found


def _capped(sample: Sample, cap: float) -> Sample:
    seconds = min(sample.seconds, cap)
    return sample._replace(line=sample.line._replace(duration=seconds), seconds=seconds)


def voices(model: Any, found: list[Sample]) -> list[Any]:
    """The model's prompt of each sample, one a reference: made once, and outside every time."""
    known: dict[tuple[Any, Any], Any] = {}
    out = []
    for sample in found:
        key = (sample.line.ref_audio, sample.line.ref_text)
        if key not in known:
            known[key] = voice_of(model, sample.line, REFERENCE)
        out.append(known[key])
    return out
