"""Money: prices, change, savings, wages, takings."""

from jaxmoe.tasks import words
from jaxmoe.tasks.draw import Draw
from jaxmoe.tasks.templates import Problem
from jaxmoe.tasks.working import add, div, mul, sub


def price_of_several(d: Draw) -> Problem:
    p, (one, many), shop = d.person(), d.pick(words.GOODS), d.pick(words.SHOPS)
    n, a = d.number(2, 12), d.number(2, 40)
    question = d.pick(
        (
            f"A {one} costs ${a} at the {shop}. How much do {n} {many} cost?",
            f"{p} buys {n} {many} at the {shop} for ${a} each. How many dollars does {p} pay?",
            f"At the {shop} {many} are ${a} each. What must {p} pay for {n} of them?",
        )
    )
    return question, [f"{n} {many} at ${a} each cost {mul(n, a)} dollars."], n * a


def change(d: Draw) -> Problem:
    p, (one, many), shop = d.person(), d.pick(words.GOODS), d.pick(words.SHOPS)
    n, a = d.number(2, 6), d.number(2, 20)
    paid = next(note for note in (20, 50, 100, 200, 500) if note >= n * a)
    question = d.pick(
        (
            f"{p} buys {n} {many} for ${a} each and pays with ${paid}. "
            f"How many dollars of change does {p} get?",
            f"At the {shop} a {one} costs ${a}. {p} takes {n} and hands over ${paid}. "
            f"How much change is due?",
            f"{p} has ${paid}. {p.he.capitalize()} buys {n} {many} at ${a} each. "
            f"How many dollars are left?",
        )
    )
    lines = [f"The {many} cost {mul(n, a)} dollars.", f"The change is {sub(paid, n * a)} dollars."]
    return question, lines, paid - n * a


def two_goods(d: Draw) -> Problem:
    p, shop = d.person(), d.pick(words.SHOPS)
    (x1, x), (y1, y) = d.sample(words.GOODS, 2)
    n, a, m, b = d.number(2, 9), d.number(2, 15), d.number(2, 9), d.number(2, 15)
    question = d.pick(
        (
            f"{p} buys {n} {x} for ${a} each and {m} {y} for ${b} each at the {shop}. "
            f"How many dollars does {p} spend?",
            f"A {x1} costs ${a} and a {y1} costs ${b}. How much do {n} {x} and {m} {y} cost?",
            f"At the {shop} {p} takes {m} {y} at ${b} and {n} {x} at ${a}. What is the total?",
        )
    )
    lines = [
        f"The {x} cost {mul(n, a)} dollars.",
        f"The {y} cost {mul(m, b)} dollars.",
        f"Together that is {add(n * a, m * b)} dollars.",
    ]
    return question, lines, n * a + m * b


def two_goods_change(d: Draw) -> Problem:
    p, q = d.people(2)
    (_, x), (_, y) = d.sample(words.GOODS, 2)
    n, a, m, b = d.number(2, 5), d.number(2, 12), d.number(2, 5), d.number(2, 12)
    cost = n * a + m * b
    paid = next(note for note in (50, 100, 200, 500, 1000) if note >= cost)
    question = d.pick(
        (
            f"{p} has ${paid}. {p.he.capitalize()} buys {n} {x} at ${a} each and {m} {y} at ${b} "
            f"each. How much money does {p} have left?",
            f"With ${paid} from {q}, {p} buys {n} {x} for ${a} each and {m} {y} for ${b} each. "
            f"How many dollars are left?",
        )
    )
    lines = [
        f"The {x} cost {mul(n, a)} dollars.",
        f"The {y} cost {mul(m, b)} dollars.",
        f"Together that is {add(n * a, m * b)} dollars.",
        f"{sub(paid, cost)} dollars are left.",
    ]
    return question, lines, paid - cost


def unit_price(d: Draw) -> Problem:
    p, (one, many), shop = d.person(), d.pick(words.GOODS), d.pick(words.SHOPS)
    n, a = d.number(2, 9), d.integer(2, 40)
    question = d.pick(
        (
            f"{n} {many} cost ${n * a} at the {shop}. How much is one {one}?",
            f"{p} pays ${n * a} for {n} {many}. How many dollars does each {one} cost?",
        )
    )
    return question, [f"One {one} costs {div(n * a, n)} dollars."], a


def price_from_other_amount(d: Draw) -> Problem:
    p, (_one, many) = d.person(), d.pick(words.GOODS)
    n, a, m = d.number(2, 9), d.integer(2, 20), d.number(2, 12)
    question = d.pick(
        (
            f"{n} {many} cost ${n * a}. How much do {m} {many} cost?",
            f"{p} pays ${n * a} for {n} {many}. What would {p} pay for {m} of them?",
        )
    )
    lines = [f"One costs {div(n * a, n)} dollars.", f"{m} cost {mul(m, a)} dollars."]
    return question, lines, m * a


def discount(d: Draw) -> Problem:
    p, (one, _many), shop = d.person(), d.pick(words.GOODS), d.pick(words.SHOPS)
    percent, divisor = d.pick(((50, 2), (25, 4), (20, 5), (10, 10)))
    a = divisor * d.integer(2, 20)
    question = d.pick(
        (
            f"A {one} costs ${a}. The {shop} takes {percent}% off. How much does {p} pay for it?",
            f"{p} buys a {one} of ${a} with a discount of {percent}%. How many dollars is that?",
        )
    )
    lines = [
        f"{percent}% is one part in {divisor}, so {div(a, divisor)} dollars come off.",
        f"The price is {sub(a, a // divisor)} dollars.",
    ]
    return question, lines, a - a // divisor


def money_off_each(d: Draw) -> Problem:
    p, (_one, many), shop = d.person(), d.pick(words.GOODS), d.pick(words.SHOPS)
    n, a = d.number(2, 9), d.number(6, 30)
    off = d.integer(2, a - 2)
    question = d.pick(
        (
            f"{many.capitalize()} cost ${a} each, but today the {shop} takes ${off} off each. "
            f"How much do {n} {many} cost today?",
            f"{p} buys {n} {many}. The usual price of ${a} each is ${off} lower today. "
            f"How many dollars does {p} pay?",
        )
    )
    lines = [f"Today one costs {sub(a, off)} dollars.", f"{n} cost {mul(n, a - off)} dollars."]
    return question, lines, n * (a - off)


def saving_weekly(d: Draw) -> Problem:
    p, (one, _) = d.person(), d.pick(words.GOODS)
    a, weeks, b = d.number(2, 20), d.number(2, 12), d.number(2, 60)
    question = d.pick(
        (
            f"{p} saves ${a} a week and already has ${b}. How much will {p} have after {weeks} "
            "weeks?",
            f"{p} has ${b}. Every week {p.he} puts ${a} aside for a {one}. "
            f"How many dollars does {p} have {weeks} weeks later?",
        )
    )
    lines = [
        f"In {weeks} weeks {p} saves {mul(weeks, a)} dollars.",
        f"With the ${b} that is {add(weeks * a, b)} dollars.",
    ]
    return question, lines, weeks * a + b


def weeks_to_save(d: Draw) -> Problem:
    p, (one, _) = d.person(), d.pick(words.GOODS)
    a, weeks, b = d.number(2, 12), d.integer(2, 20), d.number(2, 40)
    price = a * weeks + b
    question = d.pick(
        (
            f"A {one} costs ${price}. {p} has ${b} and saves ${a} a week. "
            f"After how many weeks can {p} buy it?",
            f"{p} wants a {one} for ${price}. {p.he.capitalize()} has ${b} already and earns ${a} "
            f"each week. How many weeks does it take?",
        )
    )
    lines = [f"{p} needs {sub(price, b)} dollars more.", f"That takes {div(price - b, a)} weeks."]
    return question, lines, weeks


def wages(d: Draw) -> Problem:
    p = d.person()
    job = d.pick(("walks dogs", "mows lawns", "washes cars", "gives lessons", "paints fences",
                  "works in a shop", "delivers papers", "repairs bicycles"))  # fmt: skip
    rate, hours, days = d.number(6, 20), d.number(2, 6), d.number(2, 6)
    question = d.pick(
        (
            f"{p} {job} for ${rate} an hour, {hours} hours a day. "
            f"How many dollars does {p} earn in {days} days?",
            f"{p} {job} {hours} hours a day on {days} days and gets ${rate} an hour. "
            f"How much money is that?",
        )
    )
    lines = [
        f"In a day {p} earns {mul(hours, rate)} dollars.",
        f"In {days} days that is {mul(days, hours * rate)} dollars.",
    ]
    return question, lines, days * hours * rate


def wages_less_costs(d: Draw) -> Problem:
    p, (one, _) = d.person(), d.pick(words.GOODS)
    rate, hours = d.number(6, 20), d.number(3, 9)
    cost = d.within(3, rate * hours - 2)
    question = d.pick(
        (
            f"{p} works {hours} hours for ${rate} an hour and then buys a {one} for ${cost}. "
            f"How much of the pay is left?",
            f"For {hours} hours of work {p} gets ${rate} an hour. {p.he.capitalize()} spends "
            f"${cost} on a {one}. How many dollars remain?",
        )
    )
    lines = [
        f"The pay is {mul(hours, rate)} dollars.",
        f"{sub(hours * rate, cost)} dollars remain.",
    ]
    return question, lines, hours * rate - cost


def stall(d: Draw) -> Problem:
    p, q = d.people(2)
    goods = d.pick(("cups of lemonade", "cakes", "pies", "candles", "jars of honey", "baskets",
                    "bags of nuts", "bottles of juice", "plants"))  # fmt: skip
    a, n, m = d.number(2, 9), d.number(5, 30), d.number(5, 30)
    day, other = d.sample(words.DAYS, 2)
    question = d.pick(
        (
            f"{p} sells {goods} for ${a} each: {n} on {day} and {m} on {other}. "
            f"How many dollars does {p} take in?",
            f"On {day} {p} sold {n} {goods}, on {other} {q} sold {m}. Each cost ${a}. "
            f"How much money did they take in?",
        )
    )
    lines = [f"They are {add(n, m)} {goods}.", f"At ${a} each that is {mul(n + m, a)} dollars."]
    return question, lines, (n + m) * a


def profit(d: Draw) -> Problem:
    p, (_one, many) = d.person(), d.pick(words.GOODS)
    n, a = d.number(3, 12), d.number(2, 12)
    b = a + d.number(2, 9)
    question = d.pick(
        (
            f"{p} buys {n} {many} for ${a} each and sells them for ${b} each. "
            f"How many dollars does {p} gain?",
            f"{p} makes {n} {many} at a cost of ${a} each and sells each for ${b}. "
            f"What is the profit?",
        )
    )
    lines = [
        f"On each {p} gains {sub(b, a)} dollars.",
        f"On {n} that is {mul(n, b - a)} dollars.",
    ]
    return question, lines, n * (b - a)


def shared_bill(d: Draw) -> Problem:
    people = d.people(d.integer(2, 5))
    n, a = len(people), d.integer(3, 30)
    first = d.integer(1, n * a - 1)
    names = ", ".join(people[:-1]) + f" and {people[-1]}"
    meal, other = d.pick((("a pizza", "drinks"), ("lunch", "cake"), ("a taxi", "tickets"),
                          ("a boat", "ice cream"), ("paint", "brushes")))  # fmt: skip
    question = d.pick(
        (
            f"{names} pay ${first} for {meal} and ${n * a - first} for {other} and share the cost "
            f"equally. How many dollars does each pay?",
            f"{names} share the cost of {meal}, ${first}, and of {other}, ${n * a - first}, "
            "equally. "
            f"How much is that for each?",
        )
    )
    lines = [
        f"In all it costs {add(first, n * a - first)} dollars.",
        f"{n} people share, so each pays {div(n * a, n)} dollars.",
    ]
    return question, lines, a


def tickets(d: Draw) -> Problem:
    place = d.pick(("zoo", "museum", "cinema", "pool", "circus", "castle", "theatre", "aquarium"))
    a, b, n, m = d.number(6, 20), d.number(2, 9), d.number(2, 6), d.number(2, 12)
    question = d.pick(
        (
            f"A visit to the {place} costs ${a} for adults and ${b} for children. "
            f"How much do {n} adults and {m} children pay?",
            f"{n} adults and {m} children go to the {place}. Adults pay ${a} and children ${b}. "
            f"How many dollars do they pay in all?",
        )
    )
    lines = [
        f"The adults pay {mul(n, a)} dollars.",
        f"The children pay {mul(m, b)} dollars.",
        f"Together they pay {add(n * a, m * b)} dollars.",
    ]
    return question, lines, n * a + m * b


def hire(d: Draw) -> Problem:
    p = d.person()
    thing = d.pick(("boat", "bicycle", "car", "tent", "kayak", "drill", "piano", "van"))
    unit = d.pick(("hour", "day"))
    fee, rate, n = d.number(3, 40), d.number(3, 20), d.number(2, 9)
    question = d.pick(
        (
            f"Hiring a {thing} costs ${fee} and then ${rate} for every {unit}. "
            f"How much does {p} pay for {n} {unit}s?",
            f"{p} hires a {thing} for {n} {unit}s. There is a fee of ${fee}, and each {unit} costs "
            f"${rate}. How many dollars does {p} pay?",
        )
    )
    lines = [
        f"The {unit}s cost {mul(n, rate)} dollars.",
        f"With the fee {add(n * rate, fee)} dollars.",
    ]
    return question, lines, n * rate + fee


def which_is_cheaper(d: Draw) -> Problem:
    p, (_one, many) = d.person(), d.pick(words.GOODS)
    n, a = d.number(3, 9), d.number(3, 15)
    pack = d.integer(n * a // 2, n * a - 1)
    question = d.pick(
        (
            f"{many.capitalize()} cost ${a} each, or ${pack} for a pack of {n}. "
            f"How many dollars does {p} save with a pack of {n}?",
            f"A pack of {n} {many} costs ${pack}. Bought one by one they cost ${a} each. "
            f"How much is saved by taking the pack?",
        )
    )
    lines = [
        f"One by one they cost {mul(n, a)} dollars.",
        f"The pack saves {sub(n * a, pack)} dollars.",
    ]
    return question, lines, n * a - pack


def how_many_can_buy(d: Draw) -> Problem:
    p, (one, many), shop = d.person(), d.pick(words.GOODS), d.pick(words.SHOPS)
    a = d.number(3, 9)
    money = d.number(a + 1, 99)
    q, r = divmod(money, a)
    question = d.pick(
        (
            f"{p} has ${money}. At the {shop} a {one} costs ${a}. How many {many} can {p} buy?",
            f"How many {many} at ${a} each can {p} buy with ${money}?",
        )
    )
    lines = [f"{mul(q, a)} dollars buy {q} {many}, and {sub(money, q * a)} dollars are too few."]
    del r
    return question, lines, q


def coins(d: Draw) -> Problem:
    p = d.person()
    a, b, c = d.number(2, 12), d.number(2, 12), d.number(2, 12)
    question = d.pick(
        (
            f"{p}'s purse holds {a} coins of 5 cents, {b} of 2 cents and {c} of 1 cent. "
            f"How many cents is that?",
            f"How many cents are {a} five-cent coins, {b} two-cent coins and {c} one-cent coins?",
        )
    )
    lines = [
        f"The fives are {mul(a, 5)} cents.",
        f"The twos are {mul(b, 2)} cents.",
        f"Together {add(a * 5, b * 2, c)} cents.",
    ]
    return question, lines, a * 5 + b * 2 + c


def budget_left(d: Draw) -> Problem:
    p = d.person()
    x, y, z = d.sample(("food", "rent", "books", "travel", "clothes", "music", "sport", "gifts"), 3)
    a, b, c = d.number(5, 99), d.number(5, 99), d.number(5, 99)
    total = a + b + c + d.integer(0, 60)
    question = d.pick(
        (
            f"{p} has ${total} for the month and spends ${a} on {x}, ${b} on {y} and ${c} on {z}. "
            f"How much is left?",
            f"From ${total}, {p} pays ${a} for {x}, ${b} for {y} and ${c} for {z}. "
            f"How many dollars remain?",
        )
    )
    lines = [
        f"{p} spends {add(a, b, c)} dollars.",
        f"{sub(total, a + b + c)} dollars are left.",
    ]
    return question, lines, total - a - b - c


def earn_save_half(d: Draw) -> Problem:
    p = d.person()
    a, days = 2 * d.number(3, 20), d.number(2, 8)
    question = d.pick(
        (
            f"{p} earns ${a} a day and saves half of it. How much does {p} save in {days} days?",
            f"Every day {p} earns ${a} and puts half of that away. "
            f"How many dollars has {p} put away after {days} days?",
        )
    )
    lines = [
        f"Half of {a} is {div(a, 2)} dollars a day.",
        f"In {days} days that is {mul(days, a // 2)} dollars.",
    ]
    return question, lines, days * a // 2


def deposit(d: Draw) -> Problem:
    p = d.person()
    n, a, b = d.number(4, 12), d.number(2, 9), d.number(2, 5)
    back = d.integer(2, n - 1)
    b = min(b, a)
    question = d.pick(
        (
            f"{p} buys {n} bottles for ${a} each and later gets ${b} back for each of {back} empty "
            f"bottles. How many dollars has {p} spent in the end?",
            f"Bottles cost ${a}, and the shop returns ${b} for an empty one. {p} buys {n} bottles "
            f"and brings back {back}. How much has {p} spent?",
        )
    )
    lines = [
        f"The bottles cost {mul(n, a)} dollars.",
        f"{p} gets back {mul(back, b)} dollars.",
        f"{p} has spent {sub(n * a, back * b)} dollars.",
    ]
    return question, lines, n * a - back * b


TRAINING = (
    price_of_several, change, two_goods, two_goods_change, unit_price, price_from_other_amount,
    discount, money_off_each, saving_weekly, weeks_to_save, wages, wages_less_costs, stall, profit,
    shared_bill, tickets, which_is_cheaper, how_many_can_buy, coins, budget_left, deposit,
)  # fmt: skip
HELD_OUT = (hire, earn_save_half)
