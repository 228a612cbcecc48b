import pytest

from cifar_zero.build_model import check_patterns, create_meta_model
from cifar_zero.config.recipe import Choice, Recipe
from cifar_zero.core.errors import UsageError


def test_a_pattern_without_a_match_is_refused():
    net = create_meta_model(Recipe(model=Choice("vit_tiny"), trainable=["head"]), 10)
    with pytest.raises(
        UsageError, match=r"--trainable head matches no parameter .* did you mean head\.\w+ or "
    ) as error:
        check_patterns(net, ["head"], ep_size=1)
    assert "\n" not in str(error.value)


def test_experts_spread_over_ranks_are_all_trained_or_all_frozen():
    model = Choice("net_moe", {"num_experts": [4], "ep_size": 2})
    one, all_of_them = ["fc3.0.experts.1.*"], ["fc3.0.experts.*"]
    with pytest.raises(UsageError, match=r"train all or none of fc3\.0\.experts\.\*\.weight"):
        check_patterns(create_meta_model(Recipe(model=model, trainable=one), 10), one, ep_size=2)
    check_patterns(create_meta_model(Recipe(model=model, trainable=all_of_them), 10), all_of_them, ep_size=2)
