import sys
import unittest

sys.path.insert(0, "/app")

from stats import median


class Median(unittest.TestCase):
    def test_odd(self):
        self.assertEqual(median([3, 1, 2]), 2)

    def test_even_is_the_mean_of_the_middle_two(self):
        self.assertEqual(median([4, 1, 3, 2]), 2.5)

    def test_the_list_is_left_alone(self):
        numbers = [3, 1, 2]
        median(numbers)
        self.assertEqual(numbers, [3, 1, 2])

    def test_empty(self):
        with self.assertRaises(ValueError):
            median([])


if __name__ == "__main__":
    unittest.main()
