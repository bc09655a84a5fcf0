"""Damage to files, as disks, transfers and people do it."""

import random


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content cut off, with bytes flipped, or parts of it swapped, left out or said to be other numbers."""
    result, first, second = bytearray(content), *sorted(chance.sample(range(len(content)), 2))
    match chance.randrange(5):
        case 0:
            return content[:second]
        case 1:
            result[first : first + 9], result[second : second + 9] = content[second:][:9], content[first:][:9]
        case 2:
            del result[first : first + chance.randrange(9)]
        case 3:
            at = chance.randrange(min(300, len(content)))
            result[at : at + 2] = chance.choice([b"-1", b"99", b"((", b"\xff\xff", b"\0\0", b"9" * 25, b"''"])
        case 4:
            for at in chance.choices(range(len(content)), k=3):
                result[at] ^= 1 << chance.randrange(8)
    return bytes(result)
