"""Calculator that models call as a tool: exact arithmetic on numbers, with bounds on size, and its definition."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

MAX_CHARACTERS = 500
MAX_DIGITS = 300
"""Largest number of digits of a number in a calculation, so that no product or power takes long."""
MAX_DECIMALS = 12
DEFINITION = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculate an expression of numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
"""Definition of the tool, as chat templates get it."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, `+ - * / // % **` and parentheses, exact up to 12 decimals.

    Raises ValueError, with a reason that a model can read, for anything else and for numbers of over 300 digits.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are read")
    try:
        value = _value(ast.parse(expression.strip().replace("×", "*").replace("^", "**"), mode="eval").body)
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("this is no expression of numbers") from error
    return _shown(value)


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        # a float's shortest decimal, so that 0.1 is a tenth
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if combine := _BINARY.get(type(node.op)):
            return _bounded(combine(left, right))
    raise ValueError("only numbers, + - * / // % ** and parentheses can be calculated")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent must be a whole number")
    digits = max(len(str(abs(base.numerator))), len(str(base.denominator)))
    if digits * abs(exponent.numerator) > MAX_DIGITS and abs(base) != 1 and base:
        raise ValueError(f"the result may have more than {MAX_DIGITS} digits")
    return _bounded(base ** (_small(exponent.numerator) if base in (0, 1, -1) else exponent.numerator))


def _small(exponent: int) -> int:
    """Return an exponent of at most 2 in size, with which 0, 1 and -1 have the same power."""
    return exponent if abs(exponent) <= 2 else (2 - exponent % 2) * (1 if exponent > 0 else -1)


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return value


def _shown(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**MAX_DECIMALS)
    whole, decimals = divmod(abs(scaled), 10**MAX_DECIMALS)
    text = f"{whole}.{decimals:0{MAX_DECIMALS}d}".rstrip("0").rstrip(".")
    return f"-{text}" if scaled < 0 else text
