"""Words that fill the slots of the templates."""

# fmt: off
WOMEN = (
    "Ada", "Agnes", "Aisha", "Alice", "Alma", "Amara", "Amelia", "Amina", "Amy", "Ana", "Anita",
    "Anna", "Astrid", "Aya", "Beatrice", "Bella", "Carmen", "Chloe", "Clara", "Daisy", "Dalia",
    "Diana", "Dora", "Edith", "Elena", "Eliza", "Ella", "Elsa", "Emily", "Emma", "Esther", "Eva",
    "Fatima", "Flora", "Freya", "Gina", "Grace", "Greta", "Hana", "Hannah", "Hazel", "Heidi",
    "Helen", "Ida", "Imani", "Ines", "Ingrid", "Iris", "Ivy", "Jade", "Jane", "Jasmine", "Joan",
    "Julia", "June", "Karin", "Kate", "Kira", "Laila", "Lara", "Laura", "Leila", "Lena", "Lily",
    "Linda", "Lucy", "Luna", "Mabel", "Maria", "Marta", "Mary", "Maya", "Mei", "Mia", "Mina",
    "Mira", "Molly", "Nadia", "Naomi", "Nina", "Nora", "Olga", "Olive", "Paula", "Petra", "Priya",
    "Rachel", "Rita", "Rosa", "Ruby", "Ruth", "Sandra", "Sara", "Sarah", "Selma", "Sofia", "Stella",
    "Tara", "Tina", "Uma", "Vera", "Wanda", "Yara", "Yuki", "Zara", "Zoe",
    "Bianca", "Celia", "Erika", "Fiona", "Gloria", "Irene", "Judith", "Lydia", "Nancy", "Pia",
)
MEN = (
    "Aaron", "Abel", "Adam", "Ahmed", "Alan", "Albert", "Alex", "Ali", "Andre", "Anton", "Arthur",
    "Axel", "Ben", "Bilal", "Bob", "Boris", "Bruno", "Carl", "Carlos", "Chen", "Chris", "Cyril",
    "Dan", "Daniel", "David", "Dennis", "Diego", "Eddie", "Edgar", "Eli", "Emil", "Eric", "Ethan",
    "Farid", "Felix", "Finn", "Frank", "Fred", "George", "Hamza", "Hans", "Harry", "Hector",
    "Henry", "Hugo", "Ibrahim", "Igor", "Isaac", "Ivan", "Jack", "Jacob", "James", "Jan", "Jim",
    "Joel", "John", "Jonas", "Jorge", "Josef", "Juan", "Kai", "Karim", "Ken", "Kofi", "Lars", "Leo",
    "Levi", "Liam", "Louis", "Luca", "Luis", "Malik", "Marco", "Martin", "Max", "Milo", "Nico",
    "Nils", "Noah", "Oliver", "Omar", "Oscar", "Otto", "Pablo", "Paul", "Pedro", "Peter", "Philip",
    "Quinn", "Raj", "Ralph", "Ravi", "Robert", "Ron", "Sam", "Samir", "Simon", "Stefan", "Tariq",
    "Theo", "Thomas", "Tim", "Tom", "Tony", "Victor", "Walter", "Will", "Yusuf",
    "Basil", "Claude", "Dmitri", "Elias", "Gabriel", "Hiro", "Julian", "Lukas", "Matteo", "Viktor",
)

# Countable, small, cheap: can be collected, given away, packed and bought.
THINGS = (
    "acorns", "almonds", "apples", "badges", "balloons", "balls", "bananas", "beads", "bells",
    "biscuits", "blocks", "bolts", "books", "bottles", "bricks", "brushes", "buns", "buttons",
    "candles", "candies", "cards", "carrots", "chestnuts", "clips", "coins", "comics", "cookies",
    "corks", "crayons", "cups", "dates", "dolls", "eggs", "envelopes", "erasers", "feathers",
    "figs", "flags", "flowers", "forks", "gems", "grapes", "hats", "hooks", "keys", "knives",
    "leaves", "lemons", "letters", "limes", "magnets", "mangoes", "maps", "marbles", "markers",
    "masks", "melons", "mints", "muffins", "mugs", "nails", "napkins", "needles", "notebooks",
    "nuts", "olives", "onions", "oranges", "peaches", "pears", "pebbles", "pencils", "pens",
    "photos", "pictures", "pins", "plates", "plums", "postcards", "potatoes", "puzzles", "radishes",
    "ribbons", "rings", "rolls", "ropes", "rulers", "screws", "seeds", "shells", "socks", "spoons",
    "stamps", "stars", "stickers", "stones", "strawberries", "sweets", "tickets", "tiles",
    "toffees", "tomatoes", "toys", "tulips", "walnuts", "whistles",
)
FRUIT = (
    "apples", "apricots", "bananas", "cherries", "figs", "lemons", "limes", "mangoes", "melons",
    "oranges", "peaches", "pears", "plums",
)
CONTAINERS = (
    ("bag", "bags"), ("basket", "baskets"), ("bowl", "bowls"), ("box", "boxes"),
    ("bucket", "buckets"), ("carton", "cartons"), ("case", "cases"), ("chest", "chests"),
    ("crate", "crates"), ("drawer", "drawers"), ("jar", "jars"), ("pack", "packs"),
    ("packet", "packets"), ("pot", "pots"), ("sack", "sacks"), ("tin", "tins"), ("tray", "trays"),
    ("tub", "tubs"),
)
GOODS = (
    ("ball", "balls"), ("basket", "baskets"), ("bell", "bells"), ("belt", "belts"),
    ("blanket", "blankets"), ("book", "books"), ("bowl", "bowls"), ("brush", "brushes"),
    ("cake", "cakes"), ("candle", "candles"), ("cap", "caps"), ("chair", "chairs"),
    ("clock", "clocks"), ("cup", "cups"), ("doll", "dolls"), ("drum", "drums"), ("fan", "fans"),
    ("game", "games"), ("hammer", "hammers"), ("hat", "hats"), ("jacket", "jackets"),
    ("kite", "kites"), ("lamp", "lamps"), ("map", "maps"), ("mirror", "mirrors"), ("mug", "mugs"),
    ("notebook", "notebooks"), ("pan", "pans"), ("pen", "pens"), ("pillow", "pillows"),
    ("plant", "plants"), ("plate", "plates"), ("poster", "posters"), ("puzzle", "puzzles"),
    ("rug", "rugs"), ("sandwich", "sandwiches"), ("scarf", "scarves"), ("shirt", "shirts"),
    ("shovel", "shovels"), ("spade", "spades"), ("stool", "stools"), ("ticket", "tickets"),
    ("torch", "torches"), ("towel", "towels"), ("toy", "toys"), ("vase", "vases"),
    ("wallet", "wallets"), ("watch", "watches"),
)
SHOPS = (
    "bakery", "bookshop", "corner shop", "fair", "flea market", "garden centre", "harbour shop",
    "hardware store", "market", "museum shop", "paper shop", "shop", "store", "supermarket",
    "toy shop", "village shop",
)
PLACES = (
    "attic", "balcony", "barn", "basement", "bathroom", "bedroom", "café", "castle", "cave",
    "cellar", "chapel", "cinema", "classroom", "cottage", "factory", "farm", "forest", "garage",
    "garden", "hall", "harbour", "hospital", "hotel", "kitchen", "laboratory", "library", "market",
    "meadow", "mill", "museum", "office", "orchard", "palace", "pantry", "park", "playground",
    "school", "shed", "stable", "station", "studio", "theatre", "tower", "valley", "village",
    "workshop", "yard",
)
COLOURS = (
    "red", "blue", "green", "yellow", "white", "black", "brown", "orange", "purple", "pink", "grey",
    "silver", "golden", "violet",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
OBJECTS = (
    "bag", "ball", "bell", "book", "bottle", "bowl", "box", "broom", "brush", "bucket", "camera",
    "candle", "clock", "coat", "compass", "crown", "cup", "doll", "drum", "fan", "feather", "flag",
    "flute", "guitar", "hammer", "hat", "jug", "kettle", "key", "kite", "knife", "ladder", "lamp",
    "lantern", "letter", "magnet", "map", "mask", "mirror", "needle", "notebook", "paint", "parcel",
    "pen", "pencil", "phone", "photo", "pillow", "plate", "puzzle", "radio", "ring", "rope",
    "ruler", "saw", "scarf", "shell", "shovel", "spoon", "stamp", "stick", "stone", "suitcase",
    "teapot", "ticket", "torch", "towel", "trumpet", "umbrella", "vase", "violin", "wallet",
    "watch", "whistle",
)
ANIMALS = (
    "badger", "bear", "camel", "cat", "cow", "crow", "dog", "donkey", "duck", "fox", "frog", "goat",
    "goose", "hamster", "hedgehog", "hen", "horse", "lizard", "monkey", "mouse", "otter", "owl",
    "parrot", "pig", "pigeon", "pony", "rabbit", "raven", "sheep", "snail", "squirrel", "swan",
    "tortoise", "turtle",
)
# fmt: on
