"""How close two numbers must be. Every test takes its tolerance from here, by name."""

FLOAT64 = {"rtol": 1e-12, "atol": 1e-12}
FLOAT64_SUM = {"rtol": 1e-10, "atol": 1e-10}  # float64, where numbers up to 10 are added in another order or cancel
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
GRADIENT = {"rtol": 0.0, "atol": 1e-6}  # the same gradient in float32 from another split of the batch
BFLOAT16 = {"rtol": 2e-2, "atol": 2e-2}  # 8 bits of mantissa: one rounding is 2**-9 = 0.002 of the value, a few add up
EXACT = {"rtol": 0.0, "atol": 0.0}
TABLE_DIGITS = {"rtol": 0.0, "atol": 5e-6}  # numbers that a table gives with five decimals
MODEL_GRADIENT = {
    "rtol": 1e-4,
    "atol": 1e-5,
}  # float32, through a model that sums in another order (no padding, no packing)
BFLOAT16_MODEL = {"rtol": 0.1, "atol": 0.2}  # log-probabilities of a whole model in bfloat16 against float32
STANDARD_ERROR = {"rtol": 1e-3, "atol": 1e-5}  # a small standard deviation in float32 loses digits to cancellation
CLOSE = FLOAT32["rtol"]  # pytest.approx(..., rel=CLOSE): one float32 number
