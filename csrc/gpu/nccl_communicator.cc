#include "gpu/nccl_communicator.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/log.h"
#include "collective/collectives.h"
#include "kernels/half.h"

namespace hororing {
namespace {

// Time between two polls of a state that raises no event.
constexpr TimeNs kCheckInterval = 100 * kMicrosecond;
// How long to poll without a pause: most groups are in the stream by then.
constexpr TimeNs kBusy = 30 * kMicrosecond;
// Time between two checks whether all peers are alive.
constexpr TimeNs kPeersInterval = 20 * kMillisecond;

// The maximum number of operations with a factor per communicator.
constexpr size_t kMaxScaledSums = 64;

// Rank 0 sends this to the others.
struct Invitation {
  int32_t sent = 0;  // zero: rank 0 has no id
  NcclId id = {};
};

// A number in the tensor's type, as NCCL reads it.
struct Scalar {
  explicit Scalar(DataType dtype, double value) {
    const float narrow = static_cast<float>(value);
    uint16_t half = 0;
    switch (dtype) {
      case DataType::kFloat64: std::memcpy(bytes, &value, sizeof value); return;
      case DataType::kFloat16: half = FloatToHalf(narrow); break;
      case DataType::kBfloat16: half = FloatToBfloat16(narrow); break;
      default: std::memcpy(bytes, &narrow, sizeof narrow); return;
    }
    std::memcpy(bytes, &half, sizeof half);
  }
  char bytes[8] = {};
};

}  // namespace

bool NcclSupportsType(DataType dtype) {
  return dtype != DataType::kInt16 && dtype != DataType::kUint16;
}

NcclType NcclTypeOf(DataType dtype) {
  constexpr NcclType kNone = kNcclUint8;
  constexpr NcclType kTypes[kDataTypeCount] = {kNcclUint8,   kNcclInt8,  kNone,        kNone,
                                               kNcclInt32,   kNcclInt64, kNcclFloat16, kNcclFloat32,
                                               kNcclFloat64, kNcclUint8, kNcclBfloat16};
  return kTypes[static_cast<size_t>(dtype)];
}

Status NcclCommunicator::Make(std::shared_ptr<const NcclApi> api, std::shared_ptr<Device> device,
                              Transport& transport, TimeNs deadline,
                              std::unique_ptr<NcclCommunicator>* made) {
  std::unique_ptr<NcclCommunicator> fresh(
      new NcclCommunicator(std::move(api), std::move(device), transport));
  HORORING_RETURN_IF_ERROR(fresh->Join(deadline));
  *made = std::move(fresh);
  return Status::Ok();
}

Status NcclCommunicator::Join(TimeNs deadline) {
  const Device::Current current(*device_);
  HORORING_RETURN_IF_ERROR(current.status());
  Invitation invitation;
  Status invited;
  if (transport_.rank() == 0) {
    invited = api_->Check(api_->get_unique_id(&invitation.id), "ncclGetUniqueId", nullptr);
    invitation.sent = invited.ok() ? 1 : 0;
  }
  HORORING_RETURN_IF_ERROR(
      Broadcast(transport_, /*root=*/0, &invitation, sizeof invitation, deadline));
  HORORING_RETURN_IF_ERROR(invited);
  if (invitation.sent == 0) {
    return Status(Code::kTransport,
                  "the first rank of the set cannot start NCCL; its log says why");
  }
  NcclConfig config{sizeof(NcclConfig), kNcclConfigMagic, kMinNcclVersion, /*blocking=*/0};
  const NcclResult begun =
      api_->comm_init(&comm_, transport_.size(), invitation.id, transport_.rank(), &config);
  return Settle(begun, "ncclCommInitRankConfig", deadline);
}

NcclCommunicator::~NcclCommunicator() { Abort(); }

void NcclCommunicator::Abort() {
  if (comm_ != nullptr) api_->comm_abort(std::exchange(comm_, nullptr));
}

// Waits until NCCL has finished its current call.
Status NcclCommunicator::Settle(NcclResult begun, const char* call, TimeNs deadline) {
  if (begun != kNcclSuccess && begun != kNcclInProgress) return api_->Check(begun, call, comm_);
  const TimeNs sleep = After(NowNs(), kBusy);
  TimeNs look_at_peers = After(NowNs(), kPeersInterval);
  for (;;) {
    NcclResult state = kNcclSuccess;
    HORORING_RETURN_IF_ERROR(
        api_->Check(api_->comm_async_error(comm_, &state), "ncclCommGetAsyncError", comm_));
    if (state != kNcclInProgress) return api_->Check(state, call, comm_);
    const TimeNs now = NowNs();
    if (now >= look_at_peers) {
      HORORING_RETURN_IF_ERROR(transport_.CheckPeers());
      look_at_peers = After(now, kPeersInterval);
    }
    if (now >= deadline) {
      return Status(Code::kTransport,
                    std::string(call) + " of NCCL " + api_->version_text() +
                        " timed out (HORORING_TIMEOUT_S sets the limit); NCCL_DEBUG=INFO shows "
                        "what it waits for");
    }
    if (now >= sleep) transport_.Sleep(After(now, kCheckInterval));
  }
}

Status NcclCommunicator::Group(const std::function<NcclResult()>& enqueue, TimeNs deadline) {
  const Device::Current current(*device_);
  HORORING_RETURN_IF_ERROR(current.status());
  HORORING_RETURN_IF_ERROR(api_->Check(api_->group_start(), "ncclGroupStart", comm_));
  const NcclResult enqueued = enqueue();
  const NcclResult ended = api_->group_end();  // also after an error: groups nest
  if (enqueued != kNcclSuccess && enqueued != kNcclInProgress) {
    return api_->Check(enqueued, "a collective", comm_);
  }
  return Settle(ended, "ncclGroupEnd", deadline);
}

Status NcclCommunicator::Poll() const {
  NcclResult state = kNcclSuccess;
  HORORING_RETURN_IF_ERROR(
      api_->Check(api_->comm_async_error(comm_, &state), "ncclCommGetAsyncError", comm_));
  return state == kNcclInProgress ? Status::Ok() : api_->Check(state, "a collective", comm_);
}

Status NcclCommunicator::Leave(TimeNs deadline) {
  const Device::Current current(*device_);
  HORORING_RETURN_IF_ERROR(current.status());
  HORORING_RETURN_IF_ERROR(Settle(api_->comm_finalize(comm_), "ncclCommFinalize", deadline));
  const NcclResult destroyed = api_->comm_destroy(std::exchange(comm_, nullptr));
  // After the call, the state of the communicator can no longer be queried.
  return destroyed == kNcclInProgress ? Status::Ok()
                                      : api_->Check(destroyed, "ncclCommDestroy", nullptr);
}

Status NcclCommunicator::ScaledSum(DataType dtype, double factor, NcclOp* op) {
  const auto made = scaled_sums_.find({dtype, factor});
  if (made != scaled_sums_.end()) {
    *op = made->second;
    return Status::Ok();
  }
  Scalar scalar(dtype, factor);
  HORORING_RETURN_IF_ERROR(
      api_->Check(api_->op_create_pre_mul_sum(op, scalar.bytes, NcclTypeOf(dtype),
                                              kNcclScalarHostImmediate, comm_),
                  "ncclRedOpCreatePreMulSum", comm_));
  scaled_sums_[{dtype, factor}] = *op;
  return Status::Ok();
}

// An operation may be freed as soon as the calls that use it have returned.
Status NcclCommunicator::LimitScaledSums() {
  if (scaled_sums_.size() < kMaxScaledSums) return Status::Ok();
  for (const auto& [what, old] : scaled_sums_) {
    HORORING_RETURN_IF_ERROR(api_->Check(api_->op_destroy(old, comm_), "ncclRedOpDestroy", comm_));
  }
  scaled_sums_.clear();
  return Status::Ok();
}

Status NcclCommunicator::MakeFusionBuffer(size_t bytes, TimeNs deadline) {
  if (std::exchange(fusion_asked_, true)) return Status::Ok();
  const Status allocated = device_->Allocate(bytes, &fusion_);
  const char mine = allocated.ok() ? 1 : 0;
  std::vector<char> all(static_cast<size_t>(transport_.size()));
  HORORING_RETURN_IF_ERROR(AllgatherV(
      transport_, &mine, std::vector<size_t>(all.size(), sizeof mine), all.data(), deadline));
  const auto without = std::find(all.begin(), all.end(), 0);
  if (without == all.end()) {
    fusion_bytes_ = bytes;
    return Status::Ok();
  }
  fusion_ = nullptr;
  if (allocated.ok() && transport_.rank() != 0) return Status::Ok();
  Log(LogLevel::kWarning, "rank " + std::to_string(without - all.begin()) + " of " +
                              std::to_string(all.size()) +
                              " in a communicator of NCCL has no memory for the fusion buffer, " +
                              std::to_string(bytes) + " bytes" +
                              (allocated.ok() ? "" : ", nor has this one: " + allocated.message()) +
                              "; all its ranks reduce tensors on the device one by one, which is "
                              "slow. Lower HORORING_FUSION_BYTES, or leave more memory free");
  return Status::Ok();
}

}  // namespace hororing
