"""Time, speed, work, schedules and habits."""

from jaxmoe.tasks import words
from jaxmoe.tasks.draw import Draw
from jaxmoe.tasks.templates import Problem
from jaxmoe.tasks.working import add, div, mul, sub


_MAKERS = (
    ("bakes", "loaves"), ("sews", "shirts"), ("paints", "tiles"), ("writes", "letters"),
    ("folds", "napkins"), ("fills", "bottles"), ("plants", "bulbs"), ("packs", "parcels"),
    ("prints", "posters"), ("polishes", "spoons"), ("peels", "potatoes"), ("types", "pages"),
    ("picks", "apples"), ("makes", "bricks"), ("ties", "knots"), ("carves", "spoons"),
)  # fmt: skip


def work_rate(d: Draw) -> Problem:
    p, (verb, t) = d.person(), d.pick(_MAKERS)
    unit = d.pick(("hour", "day", "minute"))
    a, n = d.number(2, 30), d.number(2, 12)
    question = d.pick(
        (
            f"{p} {verb} {a} {t} per {unit}. How many {t} is that in {n} {unit}s?",
            f"Every {unit} {p} {verb} {a} {t}. How many {t} are done after {n} {unit}s?",
            f"In one {unit} {p} {verb} {a} {t}. How many {t} is it in {n} {unit}s?",
        )
    )
    return question, [f"In {n} {unit}s that is {mul(n, a)} {t}."], n * a


def work_time(d: Draw) -> Problem:
    p, (verb, t) = d.person(), d.pick(_MAKERS)
    unit = d.pick(("hour", "day", "minute"))
    a, n = d.number(2, 12), d.integer(2, 20)
    question = d.pick(
        (
            f"Every {unit} {p} {verb} {a} {t}. How many {unit}s does {p} need for {a * n} {t}?",
            f"{p} {verb} {a} {t} each {unit}. After how many {unit}s are {a * n} {t} done?",
        )
    )
    return question, [f"{a} {t} take one {unit}, so it takes {div(a * n, a)} {unit}s."], n


def two_workers(d: Draw) -> Problem:
    p, q, (verb, t) = *d.people(2), d.pick(_MAKERS)
    a, b, n = d.number(2, 20), d.number(2, 20), d.number(2, 9)
    question = d.pick(
        (
            f"Every hour {p} {verb} {a} {t} and {q} {verb} {b}. "
            f"How many {t} are done by both in {n} hours?",
            f"{p} {verb} {a} {t} per hour, {q} {verb} {b} per hour. They work for {n} hours. "
            f"How many {t} is that together?",
        )
    )
    lines = [
        f"In one hour both do {add(a, b)} {t}.",
        f"In {n} hours that is {mul(n, a + b)} {t}.",
    ]
    return question, lines, n * (a + b)


def faster_worker(d: Draw) -> Problem:
    p, q, (verb, t) = *d.people(2), d.pick(_MAKERS)
    b = d.number(2, 12)
    a, n = b + d.number(1, 12), d.number(2, 9)
    question = d.pick(
        (
            f"Every hour {p} {verb} {a} {t} and {q} {verb} {b}. "
            f"How many more {t} has {p} done than {q} after {n} hours?",
            f"{p} {verb} {a} {t} per hour, {q} only {b}. By how many {t} is {p} ahead after {n} "
            f"hours?",
        )
    )
    lines = [
        f"Each hour {p} does {sub(a, b)} {t} more.",
        f"In {n} hours that is {mul(n, a - b)} {t}.",
    ]
    return question, lines, n * (a - b)


def work_left(d: Draw) -> Problem:
    p, (verb, t) = d.person(), d.pick(_MAKERS)
    a, n = d.number(2, 20), d.number(2, 9)
    total = a * n + d.integer(1, 60)
    question = d.pick(
        (
            f"{p} {verb} {a} {t} an hour and must do {total}. How many are left after {n} hours?",
            f"{total} {t} are ordered. {p} {verb} {a} every hour. After {n} hours, how many {t} "
            "are "
            f"still to be done?",
        )
    )
    lines = [f"In {n} hours {mul(n, a)} {t} are done.", f"{sub(total, n * a)} {t} are left."]
    return question, lines, total - n * a


def reading(d: Draw) -> Problem:
    p, (x, y) = d.person(), d.sample(words.DAYS, 2)
    a, b = d.number(5, 60), d.number(5, 60)
    total = a + b + d.integer(1, 120)
    question = d.pick(
        (
            f"{p}'s book has {total} pages. {p} reads {a} pages on {x} and {b} on {y}. "
            f"How many pages are left?",
            f"On {x} {p} reads {a} pages of a book and on {y} {b}. The book has {total} pages. "
            f"How many pages remain?",
        )
    )
    lines = [f"{p} has read {add(a, b)} pages.", f"{sub(total, a + b)} pages are left."]
    return question, lines, total - a - b


def reading_rest_per_day(d: Draw) -> Problem:
    p = d.person()
    n, a, b = d.number(2, 9), d.integer(3, 20), d.number(5, 60)
    total = n * a + b
    question = d.pick(
        (
            f"{p} has read {b} of {total} pages. The rest is to be read in {n} days, equally many "
            f"pages each day. How many pages a day is that?",
            f"A book has {total} pages, and {p} is done with {b}. To finish in {n} days, "
            f"how many pages must {p} read each day?",
        )
    )
    lines = [f"{sub(total, b)} pages are left.", f"Each day {div(n * a, n)} pages."]
    return question, lines, a


def distance(d: Draw) -> Problem:
    p = d.person()
    way, unit, low, high = d.pick(
        (("walks", "km", 3, 6), ("cycles", "km", 10, 25), ("drives", "km", 40, 90),
         ("sails", "miles", 5, 15), ("rides", "miles", 6, 15), ("rows", "km", 4, 9))
    )  # fmt: skip
    speed, hours = d.within(low, high), d.number(2, 8)
    question = d.pick(
        (
            f"{p} {way} {speed} {unit} an hour. How many {unit} is that in {hours} hours?",
            f"{p} {way} for {hours} hours at {speed} {unit} an hour. How many {unit} does {p} "
            "cover?",
        )
    )
    return question, [f"In {hours} hours it is {mul(hours, speed)} {unit}."], hours * speed


def journey_in_two_parts(d: Draw) -> Problem:
    p = d.person()
    a, n, b, m = d.number(3, 20), d.number(2, 6), d.number(3, 20), d.number(2, 6)
    way = d.pick(("cycles", "rides", "travels", "sails", "skates"))
    question = d.pick(
        (
            f"{p} {way} {n} hours at {a} km an hour, then {m} hours at {b} km an hour. "
            f"How many km is that in all?",
            f"First {p} {way} at {a} km per hour for {n} hours, and then at {b} km per hour for "
            f"{m} "
            f"hours. How long is the whole way in km?",
        )
    )
    lines = [
        f"The first part is {mul(n, a)} km.",
        f"The second part is {mul(m, b)} km.",
        f"Together {add(n * a, m * b)} km.",
    ]
    return question, lines, n * a + m * b


def way_left(d: Draw) -> Problem:
    p, (x, y) = d.person(), d.sample(words.PLACES, 2)
    total = d.number(20, 200)
    a = d.within(2, total // 2)
    b = d.within(2, total - a)
    question = d.pick(
        (
            f"The way from the {x} to the {y} is {total} km. {p} goes {a} km in the morning and "
            f"{b} "
            f"km after lunch. How many km are left?",
            f"{p} travels {a} km, rests, and travels {b} km more. The whole way is {total} km. "
            f"How many km does {p} still have to go?",
        )
    )
    lines = [f"{p} has gone {add(a, b)} km.", f"{sub(total, a + b)} km are left."]
    return question, lines, total - a - b


def there_and_back(d: Draw) -> Problem:
    p, place = d.person(), d.pick(words.PLACES)
    a, days = d.number(2, 12), d.number(2, 7)
    question = d.pick(
        (
            f"{p} lives {a} km from the {place} and goes there and back every day. "
            f"How many km is that in {days} days?",
            f"The {place} is {a} km away. {p} goes there and back once a day for {days} days. "
            f"How many km does {p} travel?",
        )
    )
    lines = [
        f"There and back is {mul(2, a)} km.",
        f"In {days} days that is {mul(days, 2 * a)} km.",
    ]
    return question, lines, days * 2 * a


def practice(d: Draw) -> Problem:
    p = d.person()
    thing = d.pick(("the piano", "the violin", "chess", "drawing", "the flute", "dancing"))
    a, n, b, m = d.number(10, 40), d.number(2, 5), d.number(10, 60), d.number(1, 3)
    weekend = "day" if m == 1 else "days"
    question = d.pick(
        (
            f"{p} practises {thing} {a} minutes on each of {n} days and {b} minutes on {m} other "
            f"{weekend}. How many minutes is that in all?",
            f"On {n} days {p} practises {thing} for {a} minutes a day, on {m} other {weekend} for "
            f"{b} "
            f"minutes. How many minutes does {p} practise?",
        )
    )
    if m > 1:
        question = question.replace(f"{b} minutes on {m}", f"{b} minutes each on {m}")
        question = question.replace(f"{weekend} for {b} minutes", f"{weekend} for {b} minutes each")
    lines = [
        f"The {n} days make {mul(n, a)} minutes.",
        f"The other {weekend} make {mul(m, b)} minutes.",
        f"Together {add(n * a, m * b)} minutes.",
    ]
    return question, lines, n * a + m * b


def finish_time(d: Draw) -> Problem:
    """Minutes after a full hour, within the hour."""
    p = d.person()
    start, a = d.number(2, 25), d.number(5, 30)
    hour = d.integer(2, 9)
    act = d.pick(("cleans the kitchen", "waters the plants", "does homework", "bakes", "runs",
                  "reads", "writes a letter", "mends a chair"))  # fmt: skip
    question = d.pick(
        (
            f"{p} starts {start} minutes past {hour} and {act} for {a} minutes. "
            f"How many minutes past {hour} does {p} stop?",
            f"From {start} minutes past {hour}, {p} {act}. It takes {a} minutes. "
            f"How many minutes past {hour} is it then?",
        )
    )
    return question, [f"It ends {add(start, a)} minutes past {hour}."], start + a


def hours_to_minutes(d: Draw) -> Problem:
    p = d.person()
    h, m = d.number(1, 5), d.number(2, 59)
    hours = "hour" if h == 1 else "hours"
    event = d.pick(("film", "concert", "match", "train ride", "lesson", "walk", "flight", "play"))
    question = d.pick(
        (
            f"A {event} lasts {h} {hours} and {m} minutes. How many minutes is that?",
            f"{p}'s {event} takes {h} {hours} and {m} minutes. How many minutes does it take?",
        )
    )
    lines = [f"{h} {hours} are {mul(h, 60)} minutes.", f"In all {add(h * 60, m)} minutes."]
    return question, lines, h * 60 + m


def weeks_and_days(d: Draw) -> Problem:
    p = d.person()
    w, n = d.number(2, 12), d.number(1, 6)
    days = "day" if n == 1 else "days"
    what = d.pick(("holiday", "voyage", "course", "visit", "camp", "repair"))
    question = d.pick(
        (
            f"{p}'s {what} lasts {w} weeks and {n} {days}. How many days is that?",
            f"How many days does a {what} of {w} weeks and {n} {days} last?",
        )
    )
    return (
        question,
        [f"{w} weeks are {mul(w, 7)} days.", f"In all {add(w * 7, n)} days."],
        w * 7 + n,
    )


def habit_weekly(d: Draw) -> Problem:
    p = d.person()
    what = d.pick(("cups of tea", "glasses of water", "apples", "pages", "songs", "emails",
                   "sit-ups", "laps", "slices of bread"))  # fmt: skip
    verb = d.pick(("counts", "has"))
    a, w = d.number(2, 12), d.number(2, 6)
    question = d.pick(
        (
            f"{p} {verb} {a} {what} every day. How many {what} is that in {w} weeks?",
            f"Day after day {p} {verb} {a} {what}. How many {what} are these in {w} weeks?",
        )
    )
    lines = [f"{w} weeks are {mul(w, 7)} days.", f"That makes {mul(w * 7, a)} {what}."]
    return question, lines, w * 7 * a


def machine_fill(d: Draw) -> Problem:
    a, b, n = d.number(4, 20), d.number(2, 9), d.number(2, 12)
    b = min(b, a - 1)
    thing = d.pick(("tank", "pool", "tub", "barrel", "pond"))
    question = d.pick(
        (
            f"A pipe brings {a} litres a minute into a {thing}, but {b} litres a minute leak out. "
            f"How many litres are in the {thing} after {n} minutes, if it was empty?",
            f"Every minute {a} litres flow into an empty {thing} and {b} litres flow out. "
            f"How much is in it after {n} minutes?",
        )
    )
    lines = [
        f"Each minute {sub(a, b)} litres stay.",
        f"After {n} minutes there are {mul(n, a - b)} litres.",
    ]
    return question, lines, n * (a - b)


def drain(d: Draw) -> Problem:
    a, n = d.number(2, 12), d.number(2, 12)
    total = a * n + d.integer(1, 80)
    thing = d.pick(("tank", "barrel", "pool", "boiler"))
    question = d.pick(
        (
            f"A {thing} holds {total} litres and loses {a} litres an hour. "
            f"How many litres are left after {n} hours?",
            f"{total} litres are in a {thing}. Each hour {a} litres are used. "
            f"How much remains after {n} hours?",
        )
    )
    lines = [f"{mul(n, a)} litres are gone.", f"{sub(total, n * a)} litres are left."]
    return question, lines, total - n * a


def growth(d: Draw) -> Problem:
    p = d.person()
    start, a, n = d.number(5, 60), d.number(2, 9), d.number(2, 12)
    plant = d.pick(("sunflower", "bean", "vine", "bamboo", "fern", "rose", "tree"))
    unit = d.pick(("week", "day", "month"))
    question = d.pick(
        (
            f"{p}'s {plant} is {start} cm tall and grows {a} cm every {unit}. "
            f"How tall is it after {n} {unit}s, in cm?",
            f"A {plant} of {start} cm gains {a} cm each {unit}. How many cm is it {n} {unit}s "
            "later?",
        )
    )
    lines = [f"It grows {mul(n, a)} cm.", f"Then it is {add(start, n * a)} cm tall."]
    return question, lines, start + n * a


def growth_time(d: Draw) -> Problem:
    p = d.person()
    start, a, n = d.number(5, 60), d.number(2, 9), d.integer(2, 15)
    plant = d.pick(("sunflower", "bean", "vine", "bamboo", "fern", "rose", "tree"))
    question = d.pick(
        (
            f"{p}'s {plant} is {start} cm tall and grows {a} cm a week. "
            f"After how many weeks is it {start + n * a} cm tall?",
            f"A {plant} grows {a} cm a week. How many weeks does it take from {start} cm to "
            f"{start + n * a} cm?",
        )
    )
    lines = [f"It must grow {sub(start + n * a, start)} cm.", f"That takes {div(n * a, a)} weeks."]
    return question, lines, n


def training_plan(d: Draw) -> Problem:
    p = d.person()
    a, b = d.number(2, 20), d.number(1, 9)
    act = d.pick(
        (("runs", "laps"), ("swims", "lengths"), ("does", "push-ups"), ("climbs", "steps"))
    )
    question = d.pick(
        (
            f"{p} {act[0]} {a} {act[1]} on the first day and {b} more each day than the day "
            "before. "
            f"How many {act[1]} is that in the first three days together?",
            f"On day one {p} {act[0]} {a} {act[1]}. Each day it is {b} more. "
            f"How many {act[1]} are these in three days?",
        )
    )
    lines = [
        f"The second day has {add(a, b)} {act[1]}.",
        f"The third day has {add(a + b, b)} {act[1]}.",
        f"Together {add(a, a + b, a + 2 * b)} {act[1]}.",
    ]
    return question, lines, 3 * a + 3 * b


def break_between(d: Draw) -> Problem:
    p = d.person()
    n, a, b = d.number(2, 6), d.number(10, 50), d.number(2, 15)
    what = d.pick(("lessons", "sets", "songs", "talks", "games", "rounds"))
    question = d.pick(
        (
            f"{p} plans {n} {what} of {a} minutes with a break of {b} minutes after each. "
            f"How many minutes does it all take?",
            f"Each of {n} {what} lasts {a} minutes and is followed by a break of {b} minutes. "
            f"How many minutes is that in all?",
        )
    )
    lines = [
        f"One with its break takes {add(a, b)} minutes.",
        f"All take {mul(n, a + b)} minutes.",
    ]
    return question, lines, n * (a + b)


def queue(d: Draw) -> Problem:
    a, n = d.number(2, 9), d.number(2, 12)
    b = d.number(1, 9)
    place = d.pick(("bank", "bakery", "museum", "station", "ferry", "ice cream van"))
    question = d.pick(
        (
            f"At the {place} {a} people join the queue every minute and {b} leave it. At first {n} "
            f"people stand there. How many are there after 5 minutes?",
            f"{n} people queue at the {place}. Each minute {a} come and {b} go. "
            f"How many people queue after 5 minutes?",
        )
    )
    if a < b:
        a, b = b, a
        question = d.pick(
            (
                f"{n} people wait at the {place}. Every minute {a} join them and {b} leave. "
                f"How many people wait after 5 minutes?",
            )
        )
    lines = [
        f"Each minute there are {sub(a, b)} more.",
        f"After 5 minutes there are {mul(5, a - b)} more.",
        f"That makes {add(n, 5 * (a - b))} people.",
    ]
    return question, lines, n + 5 * (a - b)


TRAINING = (
    work_rate, work_time, two_workers, faster_worker, work_left, reading, reading_rest_per_day,
    distance, journey_in_two_parts, way_left, there_and_back, practice, finish_time,
    hours_to_minutes, weeks_and_days, habit_weekly, drain, growth, growth_time, training_plan,
)  # fmt: skip
HELD_OUT = (machine_fill, break_between, queue)
