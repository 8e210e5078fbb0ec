// All update rules, and the way from a rule that is known at run time to its code.
#pragma once

#include <type_traits>

#include "rules_headers.h"
#include "table.h"

namespace fused_optim {

// Calls visit(std::integral_constant<Rule, rule>{}).
template <class Visitor>
decltype(auto) dispatch_rule(Rule rule, const Visitor& visit) {
#define FUSED_OPTIM_VISIT(enumerator, ...) \
    if (rule == Rule::enumerator) return visit(std::integral_constant<Rule, Rule::enumerator>{});
    FUSED_OPTIM_RULES(FUSED_OPTIM_VISIT)
#undef FUSED_OPTIM_VISIT
    __builtin_unreachable();
}

}  // namespace fused_optim
