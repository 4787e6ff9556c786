// Python's view of the core's C++ objects, for tests driven by hypothesis: coordinator, cache,
// planner, codec, kernels and whole in-process worlds. The only user of pybind11; built with
// HORORING_TESTING and never needed by users.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/reduce.h"
#include "engine/engine.h"
#include "engine/fusion_planner.h"
#include "engine/report_pace.h"
#include "negotiation/codec.h"
#include "negotiation/coordinator.h"
#include "negotiation_cost.h"
#include "transport/factory.h"

namespace py = pybind11;

namespace hororing {
namespace {

ReduceSpec Spec(int dtype, int op, double prescale, double postscale) {
  return {static_cast<DataType>(dtype), static_cast<ReduceOp>(op), prescale, postscale};
}

// Reduces equal byte strings, one per source.
py::bytes ReduceBytes(const ReduceSpec& spec, const std::vector<std::string>& sources) {
  std::vector<const void*> pointers;
  for (const std::string& source : sources) pointers.push_back(source.data());
  std::string result(sources.at(0).size(), '\0');
  ReduceMany(spec, static_cast<int>(sources.size()), result.data(), pointers.data(),
             static_cast<int>(pointers.size()), result.size() / ElementSize(spec.dtype));
  return result;
}

// Ranks as threads: every rank submits its tensors in its own order; returns what each rank
// holds afterwards, or the error text of each request.
using Tensor = std::pair<std::string, std::string>;  // name, bytes
std::vector<std::vector<Tensor>> PlayWorld(const std::vector<std::vector<Tensor>>& submissions,
                                           const ReduceSpec& spec, int64_t fusion_bytes,
                                           int cache_capacity, int steps) {
  py::gil_scoped_release release;
  const int size = static_cast<int>(submissions.size());
  auto transports = MakeInprocWorld(size, 20 * kMicrosecond);
  std::vector<std::vector<Tensor>> results(submissions.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      EngineConfig config;
      config.fusion_bytes = fusion_bytes;
      config.cache_capacity = cache_capacity;
      config.timeout_ns = 60 * kSecond;
      auto handles = std::make_shared<HandleTable>();
      const auto make_world = [&](World* world) {
        world->transport = std::move(transports[static_cast<size_t>(rank)]);
        world->topology =
            MakeTopology(rank, std::vector<std::string>(static_cast<size_t>(size), "host"));
        return Status::Ok();
      };
      std::vector<Tensor>& mine = results[static_cast<size_t>(rank)];
      const std::unique_ptr<Engine> engine = Engine::Begin(config, make_world, handles);
      Status started;
      while (!engine->AwaitStart(kSecond, &started)) continue;
      if (!started.ok()) return;
      for (int step = 0; step < steps; ++step) {
        mine = submissions[static_cast<size_t>(rank)];
        std::vector<int64_t> pending;
        for (auto& [name, bytes] : mine) {
          auto entry = std::make_unique<TensorEntry>();
          TensorView view;
          view.input = view.output = bytes.data();
          view.dtype = spec.dtype;
          view.shape = {static_cast<int64_t>(bytes.size() / ElementSize(spec.dtype))};
          entry->request.name = name;
          entry->request.op = spec.op;
          entry->request.prescale = spec.prescale;
          entry->request.postscale = spec.postscale;
          entry->request.tensors = {{view.dtype, view.shape}};
          entry->views = {view};
          int64_t handle = 0;
          uint64_t id = 0;
          const Status status = engine->Submit(&entry, &handle, &id);
          engine->Ring(/*blocking=*/false);
          if (!status.ok()) bytes = "error: " + status.message();
          pending.push_back(handle);
        }
        for (size_t i = 0; i < pending.size(); ++i) {
          Status status;
          if (pending[i] == 0) continue;
          handles->Wait(pending[i], 60 * kSecond, &status);
          handles->Release(pending[i]);
          if (!status.ok()) mine[i].second = "error: " + status.message();
        }
      }
      engine->Shutdown("", 60 * kSecond);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// As Python wants it: strings would be taken for UTF-8.
std::vector<std::vector<std::pair<std::string, py::bytes>>> PlayWorldInBytes(
    const std::vector<std::vector<Tensor>>& submissions, const ReduceSpec& spec,
    int64_t fusion_bytes, int cache_capacity, int steps) {
  std::vector<std::vector<std::pair<std::string, py::bytes>>> results;
  for (const auto& mine : PlayWorld(submissions, spec, fusion_bytes, cache_capacity, steps)) {
    results.emplace_back();
    for (const auto& [name, bytes] : mine) results.back().emplace_back(name, py::bytes(bytes));
  }
  return results;
}

}  // namespace
}  // namespace hororing

PYBIND11_MODULE(_testing, module) {
  using namespace hororing;
  module.doc() = "C++ objects of hororing's core, for its tests";

  py::class_<ReduceSpec>(module, "ReduceSpec")
      .def(py::init(&Spec), py::arg("dtype"), py::arg("op"), py::arg("prescale") = 1.0,
           py::arg("postscale") = 1.0);
  module.def("reduce", &ReduceBytes, py::arg("spec"), py::arg("sources"));
  module.def("set_kernels", [](const std::string& name) { return SetKernels(name.c_str()); });
  module.def("kernels_in_use", [] { return std::string(KernelsInUse()); });
  module.def("play_world", &PlayWorldInBytes, py::arg("submissions"), py::arg("spec"),
             py::arg("fusion_bytes"), py::arg("cache_capacity"), py::arg("steps") = 1);

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
      .def(py::init([](std::string name, int kind, int dtype, std::vector<int64_t> shape, int op,
                       int root) {
             Request request;
             request.name = std::move(name);
             request.kind = static_cast<Collective>(kind);
             request.op = static_cast<ReduceOp>(op);
             request.root = root;
             request.tensors = {{static_cast<DataType>(dtype), std::move(shape)}};
             return request;
           }),
           py::arg("name"), py::arg("kind") = 0, py::arg("dtype") = 7,
           py::arg("shape") = std::vector<int64_t>{4}, py::arg("op") = 1, py::arg("root") = 0)
      .def_readonly("name", &Request::name);

  py::class_<Decision>(module, "Decision")
      .def_property_readonly("kind", [](const Decision& d) { return static_cast<int>(d.kind); })
      .def_property_readonly("name", [](const Decision& d) { return d.details().name; })
      .def_readonly("cache_id", &Decision::cache_id)
      .def_property_readonly("rows", [](const Decision& d) { return d.details().rows; })
      .def_property_readonly("message",
                             [](const Decision& d) { return d.details().status.message(); });

  py::class_<ReportPace>(module, "ReportPace")
      .def(py::init<TimeNs>(), py::arg("cycle_time_ns"))
      .def("due", &ReportPace::Due, py::arg("first"), py::arg("count"), py::arg("now"))
      .def("told", &ReportPace::Told, py::arg("now"))
      .def("answered", &ReportPace::Answered);

  py::class_<Coordinator>(module, "Coordinator")
      .def(py::init([](int size, int cache_capacity) {
             Coordinator::Options options;
             options.size = size;
             options.cache_capacity = cache_capacity;
             return std::make_unique<Coordinator>(options);
           }),
           py::arg("size"), py::arg("cache_capacity") = 8)
      .def(
          "receive",
          [](Coordinator& coordinator, int rank, std::vector<Request> fresh,
             std::vector<uint64_t> cached, bool leaving, TimeNs now) {
            Report report;
            report.fresh = std::move(fresh);
            report.cached = std::move(cached);
            report.leaving = leaving;
            Report travelled;
            if (!Decode(Encode(report), &travelled)) throw std::runtime_error("codec");
            coordinator.Receive(rank, travelled, now);
          },
          py::arg("rank"), py::arg("fresh") = std::vector<Request>{},
          py::arg("cached") = std::vector<uint64_t>{}, py::arg("leaving") = false,
          py::arg("now") = 0)
      .def("decide",
           [](Coordinator& coordinator) {
             std::vector<Decision> decided;  // one of each request
             const auto agreement = coordinator.Decide();
             for (const Decision& decision :
                  agreement ? agreement->decisions : std::vector<Decision>{}) {
               for (uint64_t i = 0; i < decision.count; ++i) {
                 Decision& each = decided.emplace_back(decision);
                 each.cache_id += i;
                 each.count = 1;
               }
             }
             return decided;
           })
      .def("waiting", [](Coordinator& coordinator) {
        std::vector<std::string> names;
        for (const Waiting& waiting : coordinator.AllWaiting()) names.push_back(waiting.name);
        return names;
      });
}
