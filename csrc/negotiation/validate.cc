#include "negotiation/validate.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace hororing {
namespace {

std::string Counted(size_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string NumberText(double value) {
  char text[32];
  // The shortest text that reads back as the same value.
  for (int digits = 1;; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, value);
    double parsed = 0;
    if (digits == 17 || (std::sscanf(text, "%lf", &parsed) == 1 && parsed == value)) return text;
  }
}

// One thing that ranks must agree on: its plural for the text, how to show a rank's value (equal
// texts mean equal values), and what to do about a difference.
struct Check {
  std::string what;
  std::function<std::string(const Request&)> value;
  std::string remedy;
};

std::vector<Check> ChecksOfTensor(const Request& first, size_t index) {
  const std::string which =
      first.tensors.size() > 1 ? " of tensor " + std::to_string(index) + " of the group" : "";
  std::vector<Check> checks;
  checks.push_back({"data types" + which,
                    [index](const Request& r) { return std::string(Name(r.tensors[index].dtype)); },
                    "Every rank must pass the same data type; convert it before the call."});
  if (IsGathering(first.kind)) {
    checks.push_back(
        {"numbers of dimensions" + which,
         [index](const Request& r) { return Counted(r.tensors[index].shape.size(), "dimension"); },
         "The tensors may differ in their first dimension only."});
    checks.push_back({"trailing dimensions" + which,
                      [index](const Request& r) {
                        const std::vector<int64_t>& shape = r.tensors[index].shape;
                        std::string text = ShapeText(shape);
                        // Only the dimensions after the first count.
                        return shape.empty()
                                   ? text
                                   : "[*" + (shape.size() > 1 ? ", " : std::string()) +
                                         ShapeText({shape.begin() + 1, shape.end()}).substr(1);
                      },
                      "The tensors may differ in their first dimension only."});
  } else {
    checks.push_back({"shapes" + which,
                      [index](const Request& r) { return ShapeText(r.tensors[index].shape); },
                      "Every rank must pass the same shape; check that the model and the batch "
                      "are built identically on every rank."});
  }
  return checks;
}

std::vector<Check> ChecksOfRequest(const Request& first) {
  std::vector<Check> checks;
  if (first.kind == Collective::kAllreduce || first.kind == Collective::kReducescatter) {
    checks.push_back({"scale factors",
                      [](const Request& r) {
                        return "prescale " + NumberText(r.prescale) + ", postscale " +
                               NumberText(r.postscale);
                      },
                      "Every rank must pass the same prescale_factor and postscale_factor."});
    checks.push_back({"weights",
                      [](const Request& r) { return std::string(r.weight ? "given" : "none"); },
                      "Every rank must pass a weight, or none."});
    checks.push_back({"reduce operations", [](const Request& r) { return std::string(Name(r.op)); },
                      "Every rank must pass the same op."});
  }
  if (first.kind == Collective::kBroadcast) {
    checks.push_back({"root ranks",
                      [](const Request& r) { return "root " + std::to_string(r.root); },
                      "Every rank must pass the same root_rank."});
  }
  if (first.kind == Collective::kAddProcessSet) {
    checks.push_back({"ranks of the set",
                      [](const Request& r) { return ShapeText({r.ranks.begin(), r.ranks.end()}); },
                      "Every rank must add the same process sets in the same order."});
  }
  if (first.kind == Collective::kRemoveProcessSet) {
    checks.push_back({"process sets",
                      [](const Request& r) { return "process set " + std::to_string(r.root); },
                      "Every rank must remove the same process sets in the same order."});
  }
  checks.push_back({"CPU/GPU device selections",
                    [](const Request& r) {
                      return std::string(r.on_device() ? "on a CUDA device" : "on the CPU");
                    },
                    "Every rank must pass a tensor on a CUDA device, or every rank one on the "
                    "CPU; move it with tensor.cuda() or tensor.cpu() before the call."});
  return checks;
}

Status Compare(const std::vector<const Request*>& requests, const std::vector<int>& ranks,
               const Check& check) {
  const std::string reference = check.value(*requests[0]);
  const auto other = std::find_if(requests.begin(), requests.end(), [&](const Request* request) {
    return check.value(*request) != reference;
  });
  if (other == requests.end()) return Status::Ok();
  const std::string values =
      GroupedByRank(ranks, [&](size_t i) { return check.value(*requests[i]); });
  return Status(
      Code::kMismatch,
      requests[0]->Title() + ": " + check.what + " differ: " + values + ". " + check.remedy,
      ranks[static_cast<size_t>(other - requests.begin())]);
}

// A cheap exact comparison, so that the texts above are made only for a difference.
bool Compatible(const Request& a, const Request& b) {
  if (!IsGathering(a.kind)) return a == b;
  if (a.kind != b.kind || a.tensors.size() != b.tensors.size()) return false;
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    const Request::Tensor &x = a.tensors[i], &y = b.tensors[i];
    if (x.dtype != y.dtype || x.shape.size() != y.shape.size()) return false;
    if (x.on_device != y.on_device) return false;
    if (!x.shape.empty() && !std::equal(x.shape.begin() + 1, x.shape.end(), y.shape.begin() + 1)) {
      return false;
    }
  }
  return true;
}

}  // namespace

Status Validate(const std::vector<const Request*>& requests, const std::vector<int>& ranks) {
  const Request& first = *requests[0];
  const bool compatible =
      std::all_of(requests.begin() + 1, requests.end(),
                  [&](const Request* request) { return Compatible(first, *request); });
  if (compatible) return Status::Ok();

  HORORING_RETURN_IF_ERROR(
      Compare(requests, ranks,
              {"operations", [](const Request& r) { return std::string(Name(r.kind)); },
               "A name stands for one operation; give different operations different names, "
               "and call them in the same order on every rank where they have none."}));
  HORORING_RETURN_IF_ERROR(
      Compare(requests, ranks,
              {"numbers of tensors in the group",
               [](const Request& r) { return Counted(r.tensors.size(), "tensor"); },
               "Every rank must pass the same group."}));
  for (size_t i = 0; i < first.tensors.size(); ++i) {
    for (const Check& check : ChecksOfTensor(first, i)) {
      HORORING_RETURN_IF_ERROR(Compare(requests, ranks, check));
    }
  }
  for (const Check& check : ChecksOfRequest(first)) {
    HORORING_RETURN_IF_ERROR(Compare(requests, ranks, check));
  }
  return Status::Ok();
}

Status Weigh(const Request& request, const std::vector<int>& members,
             std::vector<double>* weights) {
  const bool valid = std::all_of(weights->begin(), weights->end(), [](double weight) {
    return weight >= 0 && std::isfinite(weight);
  });
  if (!valid) {
    return Status(Code::kInvalidArgument,
                  request.Title() + ": weights must be finite and not negative: " +
                      GroupedByRank(members, [&](size_t i) { return NumberText((*weights)[i]); }));
  }
  const double largest = *std::max_element(weights->begin(), weights->end());
  double sum = 0;
  for (double& weight : *weights) sum += largest > 0 ? weight /= largest : 0;
  weights->push_back(largest > 0 ? sum : 1);
  return Status::Ok();
}

std::string RanksText(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text += ",";
    text += std::to_string(ranks[i]);
    if (last > i) text += (last == i + 1 ? "," : "-") + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string GroupedByRank(const std::vector<int>& ranks,
                          const std::function<std::string(size_t i)>& value) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const std::string text = value(i);
    const auto group =
        std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == text; });
    if (group == groups.end()) {
      groups.push_back({text, {ranks[i]}});
    } else {
      group->second.push_back(ranks[i]);
    }
  }
  std::string text;
  for (const auto& [shown, holders] : groups) {
    if (!text.empty()) text += "; ";
    text += RanksText(holders) + ": " + shown;
  }
  return text;
}

}  // namespace hororing
