// All update rules, and the way from a rule that is known at run time to its code.
#pragma once

#include <type_traits>

#include "adam.h"
#include "lion.h"
#include "muon.h"

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

inline Scalars derive(Rule rule, const Hyper& hyper) {
    return dispatch_rule(rule, [&](auto known) { return derive<decltype(known)::value>(hyper); });
}

}  // namespace fused_optim
