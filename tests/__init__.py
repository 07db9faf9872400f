import pytest

pytest.register_assert_rewrite("testing.engine_contract", "testing.helpers")
