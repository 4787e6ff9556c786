// Python's view of what decides in the core: coordinator, its messages, the pace of reports, the
// fusion planner. benchmarks/simulate.py plays steps with them. The only user of pybind11; built
// with HORORING_TESTING and never needed by users.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/fusion_planner.h"
#include "engine/report_pace.h"
#include "negotiation/codec.h"
#include "negotiation/coordinator.h"
#include "negotiation_cost.h"

namespace py = pybind11;

PYBIND11_MODULE(_testing, module) {
  using namespace hororing;
  module.doc() = "C++ objects of hororing's core, for the simulation";

  module.def("plan_fusion", [](const std::vector<std::pair<int, int64_t>>& items, int64_t fusion) {
    std::vector<FusionItem> described;
    for (const auto& [dtype, bytes] : items) {
      FusionItem item;
      item.reduce.dtype = static_cast<DataType>(dtype);
      item.bytes = bytes;
      described.push_back(item);
    }
    return PlanFusion(described, fusion);
  });

  // What a step costs the coordinator; see negotiation_cost.h.
  py::class_<NegotiationCost>(module, "NegotiationCost")
      .def_readonly("reports", &NegotiationCost::reports)
      .def_readonly("report_bytes", &NegotiationCost::report_bytes)
      .def_readonly("agreements", &NegotiationCost::agreements)
      .def_readonly("agreement_bytes", &NegotiationCost::agreement_bytes)
      .def_readonly("decisions", &NegotiationCost::decisions)
      .def_readonly("agreements_sent", &NegotiationCost::agreements_sent)
      .def_readonly("work_ns", &NegotiationCost::work_ns)
      .def_readonly("host_ns", &NegotiationCost::host_ns);
  module.def("play_negotiation", &PlayNegotiation, py::arg("ranks"), py::arg("bursts"),
             py::arg("steps"), py::arg("combined") = 1);

  py::class_<Request>(module, "Request")
      .def(py::init([](std::string name, int kind, int dtype, std::vector<int64_t> shape) {
        Request request;
        request.name = std::move(name);
        request.kind = static_cast<Collective>(kind);
        request.tensors = {{static_cast<DataType>(dtype), std::move(shape)}};
        return request;
      }));

  py::class_<Decision>(module, "Decision")
      .def_property_readonly("name", [](const Decision& d) { return d.details().name; })
      .def_readonly("cache_id", &Decision::cache_id);

  py::class_<ReportPace>(module, "ReportPace")
      .def(py::init<TimeNs>(), py::arg("cycle_time_ns"))
      .def("due", &ReportPace::Due, py::arg("first"), py::arg("count"), py::arg("now"))
      .def("on_report_sent", &ReportPace::OnReportSent, py::arg("now"))
      .def("on_answer", &ReportPace::OnAnswer);

  py::class_<Coordinator>(module, "Coordinator")
      .def(py::init([](int size, int cache_capacity) {
             Coordinator::Options options;
             options.size = size;
             options.cache_capacity = cache_capacity;
             return std::make_unique<Coordinator>(options);
           }),
           py::arg("size"), py::arg("cache_capacity"))
      .def(
          "receive",
          [](Coordinator& coordinator, int rank, std::vector<Request> fresh,
             std::vector<uint64_t> cached, TimeNs now) {
            Report report;
            report.fresh = std::move(fresh);
            report.cached = std::move(cached);
            Report travelled;
            if (!Decode(Encode(report), &travelled)) throw std::runtime_error("codec");
            coordinator.Receive(rank, travelled, now);
          },
          py::arg("rank"), py::arg("fresh"), py::arg("cached"), py::arg("now"))
      .def("decide", [](Coordinator& coordinator) {
        std::vector<Decision> decided;  // one of each request
        const auto agreement = coordinator.TakeAgreement();
        for (const Decision& decision :
             agreement ? agreement->decisions : std::vector<Decision>{}) {
          for (uint64_t i = 0; i < decision.count; ++i) {
            Decision& each = decided.emplace_back(decision);
            each.cache_id += i;
            each.count = 1;
          }
        }
        return decided;
      });
}
