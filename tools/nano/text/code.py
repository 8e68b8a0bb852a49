"""Short programming answers: small Python functions, one-liners and what they print."""

from __future__ import annotations

from tools.nano.text.core import ChatExchange, DialogueContext, Phrasings, ask, one

FUNCTIONS = {
    "adds two numbers": ("add", "a, b", "return a + b"),
    "subtracts two numbers": ("subtract", "a, b", "return a - b"),
    "multiplies two numbers": ("multiply", "a, b", "return a * b"),
    "divides two numbers": ("divide", "a, b", "return a / b"),
    "squares a number": ("square", "n", "return n * n"),
    "reverses a string": ("reverse", "text", "return text[::-1]"),
    "checks if a number is even": ("is_even", "n", "return n % 2 == 0"),
    "checks if a number is odd": ("is_odd", "n", "return n % 2 == 1"),
    "counts the vowels in a string": ("count_vowels", "text", "return sum(letter in \"aeiou\" for letter in text.lower())"),
    "checks if a word is a palindrome": ("is_palindrome", "word", "return word == word[::-1]"),
    "returns the largest item of a list": ("largest", "items", "return max(items)"),
    "returns the smallest item of a list": ("smallest", "items", "return min(items)"),
    "sums a list": ("total", "numbers", "return sum(numbers)"),
    "returns the average of a list": ("average", "numbers", "return sum(numbers) / len(numbers)"),
    "returns the length of a string": ("length", "text", "return len(text)"),
    "converts Celsius to Fahrenheit": ("to_fahrenheit", "celsius", "return celsius * 9 / 5 + 32"),
    "removes duplicates from a list": ("unique", "items", "return list(dict.fromkeys(items))"),
    "counts the words in a text": ("count_words", "text", "return len(text.split())"),
    "greets a person by name": ("greet", "name", "return f\"Hello, {name}!\""),
    "turns a string into capital letters": ("shout", "text", "return text.upper()"),
    "joins a list of words with spaces": ("join_words", "words", "return \" \".join(words)"),
    "returns the last item of a list": ("last", "items", "return items[-1]"),
    "returns the first item of a list": ("first", "items", "return items[0]"),
    "doubles every number in a list": ("double_all", "numbers", "return [2 * number for number in numbers]"),
    "keeps only the even numbers of a list": ("evens", "numbers", "return [n for n in numbers if n % 2 == 0]"),
    "computes the factorial of a number": (
        "factorial", "n", "result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result",
    ),
    "returns the n-th Fibonacci number": (
        "fibonacci", "n", "a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    ),
    "checks if a number is prime": (
        "is_prime", "n",
        "if n < 2:\n        return False\n    for i in range(2, int(n ** 0.5) + 1):\n        if n % i == 0:\n"
        "            return False\n    return True",
    ),
    "computes the greatest common divisor": (
        "gcd", "a, b", "while b:\n        a, b = b, a % b\n    return a",
    ),
    "counts how often each letter occurs": (
        "letter_counts", "text",
        "counts = {}\n    for letter in text:\n        counts[letter] = counts.get(letter, 0) + 1\n    return counts",
    ),
    "finds an item by binary search": (
        "binary_search", "items, target",
        "low, high = 0, len(items) - 1\n    while low <= high:\n        middle = (low + high) // 2\n"
        "        if items[middle] == target:\n            return middle\n        if items[middle] < target:\n"
        "            low = middle + 1\n        else:\n            high = middle - 1\n    return -1",
    ),
    "sorts a list with bubble sort": (
        "bubble_sort", "items",
        "items = list(items)\n    for end in range(len(items) - 1, 0, -1):\n        for i in range(end):\n"
        "            if items[i] > items[i + 1]:\n                items[i], items[i + 1] = items[i + 1], items[i]\n"
        "    return items",
    ),
    "prints FizzBuzz up to n": (
        "fizzbuzz", "n",
        "for i in range(1, n + 1):\n        if i % 15 == 0:\n            print(\"FizzBuzz\")\n        elif i % 3 == 0:\n"
        "            print(\"Fizz\")\n        elif i % 5 == 0:\n            print(\"Buzz\")\n        else:\n            print(i)",
    ),
}  # fmt: skip
REQUEST = Phrasings(
    train=(
        "Write a Python function that {d}.", "Write a function that {d}.", "Show me Python code that {d}.",
        "I need a Python function that {d}.", "Can you write a function that {d}?", "Python: a function that {d}.",
        "How do I write a Python function that {d}?", "Give me a small Python function that {d}.",
        "Please code a function that {d}.", "Implement a function that {d}.", "Define a Python function that {d}.",
        "Could you show me a function that {d}?", "In Python, write a function that {d}.",
    ),
    heldout=(
        "Can you give me a Python function that {d}?", "Please write Python code for a function that {d}.",
        "Create a function in Python that {d}.",
    ),
)  # fmt: skip
EXPLAIN = Phrasings(
    train=("Explain it.", "How does it work?", "What does this function do?", "Can you explain the code?", "Explain the function."),
    heldout=("Please explain this code.",),
)  # fmt: skip
EXAMPLE = Phrasings(
    train=("How do I call it?", "Show me how to use it.", "How do I use that function?", "Give an example call."),
    heldout=("How would I call this function?",),
)  # fmt: skip
LOOP = Phrasings(
    train=(
        "Write a Python loop that prints the numbers from {a} to {b}.", "Print the numbers {a} to {b} with a for loop.",
        "How do I print the numbers from {a} to {b} in Python?", "Python code to print {a} to {b}?",
    ),
    heldout=("Show a Python loop printing the numbers {a} to {b}.",),
)  # fmt: skip
ARGUMENTS = {"a, b": "12, 4", "n": "7", "text": '"hello"', "word": '"level"', "celsius": "20", "name": '"Anna"',
             "items": "[3, 1, 2]", "numbers": "[3, 1, 2]", "words": '["a", "b"]', "items, target": "[1, 3, 5], 3"}  # fmt: skip


def block(code: str) -> str:
    """Code as a fenced block."""
    return f"```python\n{code}\n```"


def function(context: DialogueContext) -> list[ChatExchange]:
    """A small function, then perhaps an explanation and an example call."""
    task = context.pick(tuple(FUNCTIONS))
    name, parameters, body = FUNCTIONS[task]
    source = f"def {name}({parameters}):\n    {body}"
    chat = one(ask(context, REQUEST, d=task), block(source))
    if context.chance(0.25):
        answer = f"The function {name} takes {parameters.replace(', ', ' and ')} and {task}."
        chat.append(ChatExchange(ask(context, EXPLAIN), answer))
    if context.chance(0.2):
        call = f"{name}({ARGUMENTS[parameters]})"
        chat.append(
            ChatExchange(ask(context, EXAMPLE), block(call if name == "fizzbuzz" else f"print({call})"))
        )
    return chat


def loop(context: DialogueContext) -> list[ChatExchange]:
    """A loop over a range."""
    start, stop = context.number(0, 20), context.number(21, 200)
    code = f"for i in range({start}, {stop + 1}):\n    print(i)"
    return one(ask(context, LOOP, a=start, b=stop), block(code))
