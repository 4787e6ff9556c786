// HierarchicalNccl's way through a batch, piece by piece.
#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <string>

#include "backend/common.h"
#include "backend/device_wait.h"
#include "backend/hierarchical_nccl.h"
#include "collective/collectives.h"

namespace hororing {

class HierarchicalNccl::Walk {
 public:
  Walk(HierarchicalNccl& ranks, const Batch& batch, const Gpu& gpu,
       const std::vector<std::shared_ptr<const DeviceEvent>>& ready, TimeNs timeout,
       TraceSink& trace)
      : ranks_(ranks),
        batch_(batch),
        spec_(ranks.WithDivisor(batch.reduce)),
        gpu_(gpu),
        ready_(ready),
        scaled_(ranks.WayOf(batch, gpu.scales) == NcclWay::kScaled),
        timeout_(timeout),
        trace_(trace),
        owners_(static_cast<size_t>(ranks.owners_)),
        hosts_(ranks.ranks_on_.size()),
        owns_(ranks.across_.has_value()),
        even_(ranks.local_.size() == ranks.owners_) {
    if (batch.kind == Collective::kBroadcast) root_ = Find(ranks.ranks_on_, batch.root);
    if (scaled_) widening_ = WideningOf(spec_.dtype);
    dtype_ = scaled_ ? widening_.dtype : spec_.dtype;
    if (batch.kind == Collective::kAllgather) dtype_ = DataType::kUint8;
    element_ = batch.kind == Collective::kAllgather ? 1 : ElementSize(spec_.dtype);
  }

  Status Run() {
    const bool own_parts =
        batch_.kind == Collective::kAllgather || batch_.kind == Collective::kReducescatter;
    own_parts ? CutParts() : CutWhole();
    if (Reduces()) {
      op_ = PlainOp(spec_.op);
      if (!scaled_) {
        HORORING_RETURN_IF_ERROR(OpOf(spec_, ranks_.transport_.size(), *gpu_.communicator, &op_));
      }
    }
    for (size_t k = 0; k < pieces_.size(); ++k) {
      if (k == 0) HORORING_RETURN_IF_ERROR(Scatter(k));
      if (k + 1 < pieces_.size()) HORORING_RETURN_IF_ERROR(Scatter(k + 1));
      if (owns_) HORORING_RETURN_IF_ERROR(Across(k));
      HORORING_RETURN_IF_ERROR(Gather(k));
    }
    return Status::Ok();
  }

 private:
  // The same on all ranks, but for what is copied.
  struct Piece {
    std::vector<DeviceCopy> in, out;
    std::byte* begin = nullptr;  // in the fusion buffer
    size_t slice = 0;            // bytes of each owner's
    std::vector<size_t> blocks;  // of an all-gather: bytes of each host's, of this rank's slice
    std::shared_ptr<DeviceEvent> fetched;
  };

  bool Reduces() const {
    return batch_.kind == Collective::kAllreduce || batch_.kind == Collective::kReducescatter;
  }
  bool Broadcasts() const { return batch_.kind == Collective::kBroadcast; }
  // This host has the root.
  bool FromHere() const { return Broadcasts() && root_.host == ranks_.own_.host; }
  bool IsRoot() const { return FromHere() && root_.local == ranks_.own_.local; }

  Piece& PieceAt(size_t k) {
    while (pieces_.size() <= k) {
      pieces_.emplace_back();
      pieces_.back().begin = gpu_.communicator->fusion_buffer() +
                             (pieces_.size() + 1) % 2 * owners_ * ranks_.slice_bytes_;
      pieces_.back().blocks.assign(hosts_, 0);
    }
    return pieces_[k];
  }

  size_t Amount(size_t elements) const { return scaled_ ? elements : elements * element_; }

  // Cuts elements_of(entry) of all entries into pieces of `room` bytes: calls visit(entry, first
  // element, elements, piece, where it lies there).
  template <typename ElementsOf, typename Visit>
  void Cut(size_t room, ElementsOf elements_of, Visit visit) {
    const size_t wide = ElementSize(dtype_);
    size_t piece = 0, filled = 0;
    for (const BatchEntry& entry : batch_.entries) {
      const size_t all = elements_of(entry);
      for (size_t first = 0; first < all;) {
        if (filled == room) {
          ++piece;
          filled = 0;
        }
        const size_t elements = std::min(all - first, (room - filled) / wide);
        visit(entry, first, elements, piece, filled);
        first += elements;
        filled += RoundUp(elements * wide, kEntryAlign);
      }
    }
  }

  void CutWhole() {
    size_t end = 0;
    Cut(
        owners_ * ranks_.slice_bytes_, [](const BatchEntry& entry) { return entry.elements; },
        [&](const BatchEntry& entry, size_t first, size_t elements, size_t k, size_t at) {
          Piece& piece = PieceAt(k);
          const auto* from = static_cast<const std::byte*>(entry.input) + first * element_;
          auto* to = static_cast<std::byte*>(entry.output) + first * element_;
          const size_t amount = Amount(elements);
          if (!Broadcasts() || IsRoot()) piece.in.push_back({piece.begin + at, from, amount});
          // In place the root has it already.
          if (!IsRoot() || from != to) piece.out.push_back({to, piece.begin + at, amount});
          end = at + RoundUp(elements * ElementSize(dtype_), kEntryAlign);
          piece.slice = RoundUp(end, owners_ * kEntryAlign) / owners_;
        });
  }

  // Each rank's part of every entry goes to its block.
  void CutParts() {
    const bool gathers = batch_.kind == Collective::kAllgather;
    const auto parts_of = [&](const BatchEntry& entry) -> const std::vector<size_t>& {
      return gathers ? entry.receive_bytes : entry.parts;
    };
    const size_t size = static_cast<size_t>(ranks_.transport_.size());
    const size_t own = static_cast<size_t>(ranks_.transport_.rank());
    size_t most = 0;  // bytes of a rank's parts
    for (size_t rank = 0; rank < size; ++rank) {
      size_t bytes = 0;
      for (const BatchEntry& entry : batch_.entries) {
        bytes += RoundUp(parts_of(entry)[rank] * ElementSize(dtype_), kEntryAlign);
      }
      most = std::max(most, bytes);
    }
    const size_t room = ranks_.slice_bytes_ / hosts_ / kEntryAlign * kEntryAlign;
    block_ = std::min(room, most);
    for (size_t each = 0; each < size; ++each) {
      const Place place{each / owners_, each % owners_};
      const size_t rank = static_cast<size_t>(ranks_.ranks_on_[place.host][place.local]);
      Cut(
          block_, [&](const BatchEntry& entry) { return parts_of(entry)[rank]; },
          [&](const BatchEntry& entry, size_t first, size_t elements, size_t k, size_t at) {
            Piece& piece = PieceAt(k);
            piece.slice = hosts_ * block_;
            std::byte* const there = Block(piece, place) + at;
            const std::vector<size_t>& parts = parts_of(entry);
            const size_t before =
                std::accumulate(parts.begin(), parts.begin() + static_cast<long>(rank), first);
            const size_t amount = Amount(elements);
            const auto* input = static_cast<const std::byte*>(entry.input);
            auto* output = static_cast<std::byte*>(entry.output);
            if (gathers) {
              if (rank == own) piece.in.push_back({there, input + first, amount});
              piece.out.push_back({output + before, there, amount});
              if (place.local == ranks_.own_.local) piece.blocks[place.host] = at + elements;
            } else {
              piece.in.push_back({there, input + before * element_, amount});
              if (rank == own) piece.out.push_back({output + first * element_, there, amount});
            }
          });
    }
  }

  std::byte* Slice(const Piece& piece, size_t owner) const {
    return piece.begin + owner * piece.slice;
  }
  std::byte* Block(const Piece& piece, const Place& place) const {
    return piece.begin + (place.local * hosts_ + place.host) * block_;
  }
  std::byte* Pinned(size_t k) const {
    return static_cast<std::byte*>(ranks_.pinned_[k % 2]->data());
  }

  // One group of `count` calls.
  Status Group(size_t count, const std::function<NcclResult(size_t)>& call) {
    return gpu_.communicator->Group(
        [&] {
          NcclResult result = kNcclSuccess;
          for (size_t i = 0; i < count; ++i) {
            result = call(i);
            if (result != kNcclSuccess && result != kNcclInProgress) break;
          }
          return result;
        },
        After(NowNs(), timeout_));
  }

  Status Move(const std::vector<DeviceCopy>& copies, DeviceCast cast, double factor) const {
    if (copies.empty()) return Status::Ok();
    return scaled_ ? gpu_.device.ScaleOnDevice(copies, cast, factor)
                   : gpu_.device.CopyOnDevice(copies);
  }

  Status Scatter(size_t k) {
    Piece& piece = pieces_[k];
    StageSpan pack(trace_, Stage::kPack, batch_);
    HORORING_RETURN_IF_ERROR(Move(piece.in, widening_.in, spec_.prescale));
    pack.End(owners_ * piece.slice);
    if (Reduces()) HORORING_RETURN_IF_ERROR(ReduceInHost(piece));
    if (FromHere()) {
      HORORING_RETURN_IF_ERROR(Group(1, [&](size_t) {
        return api_.broadcast(piece.begin, piece.begin, owners_ * piece.slice, kNcclUint8,
                              static_cast<int>(root_.local), comm_, stream_);
      }));
    }
    if (!owns_) return Status::Ok();
    if (Reduces() || FromHere()) {
      HORORING_RETURN_IF_ERROR(
          gpu_.device.CopyToHost(Pinned(k), Slice(piece, ranks_.own_.local), piece.slice));
    } else if (!Broadcasts()) {
      HORORING_RETURN_IF_ERROR(FetchBlock(k));
    }
    // Also where nothing was copied: what lies there may still be on its way to the device.
    return gpu_.device.Record(stream_, &piece.fetched);
  }

  Status ReduceInHost(const Piece& piece) {
    const NcclType type = NcclTypeOf(dtype_);
    const size_t count = piece.slice / ElementSize(dtype_);
    if (even_) {
      return Group(1, [&](size_t) {
        return api_.reduce_scatter(piece.begin, Slice(piece, ranks_.own_.local), count, type, op_,
                                   comm_, stream_);
      });
    }
    return Group(owners_, [&](size_t owner) {
      std::byte* const slice = Slice(piece, owner);
      return api_.reduce(slice, slice, count, type, op_, static_cast<int>(owner), comm_, stream_);
    });
  }

  Status GatherInHost(const Piece& piece) {
    if (even_) {
      return Group(1, [&](size_t) {
        return api_.all_gather(Slice(piece, ranks_.own_.local), piece.begin, piece.slice,
                               kNcclUint8, comm_, stream_);
      });
    }
    return Group(owners_, [&](size_t owner) {
      std::byte* const slice = Slice(piece, owner);
      return api_.broadcast(slice, slice, piece.slice, kNcclUint8, static_cast<int>(owner), comm_,
                            stream_);
    });
  }

  // Blocks of an all-gather lie back to back in pinned memory.
  size_t Before(const Piece& piece, size_t host) const {
    return std::accumulate(piece.blocks.begin(), piece.blocks.begin() + static_cast<long>(host),
                           size_t{0});
  }

  Status FetchBlock(size_t k) {
    const Piece& piece = pieces_[k];
    const size_t host = ranks_.own_.host;
    if (piece.blocks[host] == 0) return Status::Ok();
    return gpu_.device.CopyToHost(Pinned(k) + Before(piece, host), Block(piece, ranks_.own_),
                                  piece.blocks[host]);
  }

  Status Across(size_t k) {
    const Piece& piece = pieces_[k];
    HORORING_RETURN_IF_ERROR(Reach(*piece.fetched));
    const TimeNs deadline = After(NowNs(), timeout_);
    Subgroup& owners = *ranks_.across_;
    const ReduceSpec plain{dtype_, spec_.op};
    if (batch_.kind == Collective::kAllgather) {
      std::byte* const all = Pinned(k);
      return AllgatherV(owners, all + Before(piece, ranks_.own_.host), piece.blocks, all, deadline);
    }
    if (batch_.kind == Collective::kReducescatter) {
      const std::vector<size_t> parts(hosts_, block_ / ElementSize(dtype_));
      return RankOrderReduceScatter(
          owners, {Pinned(k), parts, Pinned(k) + ranks_.own_.host * block_, plain}, ranks_.scratch_,
          deadline);
    }
    Batch slice;
    slice.kind = batch_.kind;
    slice.reduce = plain;
    slice.root = static_cast<int>(root_.host);
    slice.entries.resize(1);
    slice.entries[0].name = TraceLabel(batch_);
    slice.entries[0].input = slice.entries[0].output = Pinned(k);
    slice.entries[0].elements = piece.slice / ElementSize(dtype_);
    return ranks_.across_backend_->Run(slice, deadline, trace_);
  }

  Status Gather(size_t k) {
    const Piece& piece = pieces_[k];
    if (owns_) HORORING_RETURN_IF_ERROR(Return(k));
    if (batch_.kind != Collective::kReducescatter && !FromHere()) {
      HORORING_RETURN_IF_ERROR(GatherInHost(piece));
    }
    StageSpan unpack(trace_, Stage::kUnpack, batch_);
    HORORING_RETURN_IF_ERROR(Move(piece.out, widening_.out, spec_.postscale));
    unpack.End(owners_ * piece.slice);
    return Status::Ok();
  }

  // What has come across goes back to the device.
  Status Return(size_t k) {
    const Piece& piece = pieces_[k];
    const Place& own = ranks_.own_;
    switch (batch_.kind) {
      case Collective::kReducescatter:
        return gpu_.device.CopyToDevice(Block(piece, own), Pinned(k) + own.host * block_, block_);
      case Collective::kAllgather:
        for (size_t host = 0; host < hosts_; ++host) {
          if (host == own.host || piece.blocks[host] == 0) continue;
          HORORING_RETURN_IF_ERROR(gpu_.device.CopyToDevice(Block(piece, {host, own.local}),
                                                            Pinned(k) + Before(piece, host),
                                                            piece.blocks[host]));
        }
        return Status::Ok();
      default:
        return FromHere()
                   ? Status::Ok()
                   : gpu_.device.CopyToDevice(Slice(piece, own.local), Pinned(k), piece.slice);
    }
  }

  // However long the framework's kernels before it take; from then on as long as a batch may take.
  Status Reach(const DeviceEvent& event) const {
    const auto look = [&] {
      HORORING_RETURN_IF_ERROR(ranks_.transport_.CheckPeers());
      return gpu_.communicator->Look();
    };
    for (const auto& inputs : ready_) {
      HORORING_RETURN_IF_ERROR(WaitFor(*inputs, ranks_.transport_, look));
    }
    const TimeNs deadline = After(NowNs(), timeout_);
    return WaitFor(event, ranks_.transport_, [&] {
      HORORING_RETURN_IF_ERROR(look());
      return NowNs() < deadline ? Status::Ok() : TookTooLong(TraceLabel(batch_));
    });
  }

  HierarchicalNccl& ranks_;
  const Batch& batch_;
  const ReduceSpec spec_;
  const Gpu& gpu_;
  const std::vector<std::shared_ptr<const DeviceEvent>>& ready_;
  const NcclApi& api_ = gpu_.communicator->api();
  const NcclComm comm_ = gpu_.communicator->comm();
  const CuStream stream_ = gpu_.device.stream();
  const bool scaled_;  // by our kernels
  const TimeNs timeout_;
  TraceSink& trace_;
  const size_t owners_, hosts_;
  const bool owns_;  // a slice
  const bool even_;  // all ranks of this host do
  Place root_ = {};
  Widening widening_ = {};
  DataType dtype_;    // in the fusion buffer
  size_t element_;    // bytes, in tensors
  size_t block_ = 0;  // bytes of a rank's block, where slices have some
  NcclOp op_ = kNcclSum;
  std::vector<Piece> pieces_;
};

Status HierarchicalNccl::Run(const Batch& batch, const Gpu& gpu,
                             const std::vector<std::shared_ptr<const DeviceEvent>>& ready,
                             TimeNs timeout, TraceSink& trace) {
  if (across_backend_) {
    Tuning tuning = tuning_;
    // Sums of 16-bit floats may be float32 up to the end, and are rounded there, once.
    if (batch.reduce.dtype != DataType::kFloat32) tuning.wires = {};
    across_backend_->Tune(tuning);
  }
  return Walk(*this, batch, gpu, ready, timeout, trace).Run();
}

}  // namespace hororing
