import pytest

pytest.register_assert_rewrite("tests.engine_contract", "tests.helpers")
