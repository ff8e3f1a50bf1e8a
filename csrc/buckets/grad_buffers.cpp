#include "buckets/grad_buffers.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "kernels/cast.h"

namespace lockstep {
namespace {

constexpr const char* kWhyDtypesMatter =
    "Buckets are laid out for the parameter as it was when it was wrapped. Wrap the module again after changing the "
    "dtype, device or shape of its parameters";

int64_t reals_per_element(const at::Tensor& tensor) { return tensor.is_complex() ? 2 : 1; }

at::ScalarType real_type(const at::Tensor& tensor) {
  return tensor.is_complex() ? c10::toRealValueType(tensor.scalar_type()) : tensor.scalar_type();
}

std::vector<int64_t> row_major(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t next = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = next;
    next *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

std::vector<int64_t> slot_strides(const at::Tensor& param) {
  return param.is_non_overlapping_and_dense() ? param.strides().vec() : row_major(param.sizes());
}

bool same_order(at::IntArrayRef sizes, at::IntArrayRef a, at::IntArrayRef b) {
  if (a == b) return true;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && a[d] != b[d]) return false;
  }
  return true;
}

/// The parameter's gradient, to be read or replaced. It must not be held across calls into autograd.
at::Tensor& grad_of(const at::Tensor& param) { return param.mutable_grad(); }

at::Tensor empty_sparse_like(const at::Tensor& param) {
  return at::_sparse_coo_tensor_with_dims(1, param.dim() - 1, param.sizes(), param.options().layout(at::kSparse));
}

}  // namespace

std::string ParamList::label(ParamId id) const { return fmt::format("'{}' (#{})", names[index(id)], index(id)); }

std::vector<ParamSpec> specs_of(const ParamList& params) {
  std::vector<std::pair<at::ScalarType, at::Device>> kinds;
  std::vector<ParamSpec> specs;
  specs.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params.tensors[i];
    const std::pair kind{param.scalar_type(), param.device()};
    auto found = std::find(kinds.begin(), kinds.end(), kind);
    if (found == kinds.end()) found = kinds.insert(kinds.end(), kind);
    specs.push_back({.numel = param.numel() * reals_per_element(param),
                     .element_size = static_cast<int64_t>(c10::elementSize(real_type(param))),
                     .kind = static_cast<int>(found - kinds.begin()),
                     .sparse = params.sparse[i]});
  }
  return specs;
}

void choose_in_place(std::vector<ParamSpec>& specs, std::optional<int64_t> bytes) {
  for (ParamSpec& spec : specs) spec.in_place = bytes && !spec.sparse && spec.numel * spec.element_size >= *bytes;
}

GradBuffers::GradBuffers(const ParamList& params, GradPlacement placement, BucketLifetime lifetime, BucketPlan plan,
                         const WireType& wire)
    : params_(&params), placement_(placement), lifetime_(lifetime) {
  strides_.reserve(params.size());
  for (const at::Tensor& param : params.tensors) strides_.push_back(slot_strides(param));
  adopt(std::move(plan), wire);
}

void GradBuffers::adopt(BucketPlan plan, const WireType& wire) {
  const std::vector<at::Tensor> old_views = std::move(views_);
  plan_ = std::make_unique<const BucketPlan>(std::move(plan));
  wire_.assign(plan_->num_buckets(), at::Tensor());
  homes_.assign(plan_->num_buckets(), at::Tensor());
  wire_types_.clear();
  for (size_t b = 0; b < wire_.size(); ++b) {
    const BucketId id = bucket_id(b);
    const bool as_it_is = !wire || plan_->bucket(id).sparse;
    wire_types_.push_back(as_it_is ? grad_type(id) : wire(grad_type(id), is_complex(id)));
    if (keeps_memory()) provide_memory(id);
  }
  in_place_.assign(params_->size(), at::Tensor());
  members_.clear();
  members_.resize(plan_->num_buckets());
  views_.clear();
  if (placement_ == GradPlacement::kOwnMemory) return;
  views_.resize(params_->size());
  for (const Bucket& bucket : plan_->buckets()) {
    if (bucket.sparse) continue;
    for (const ParamId id : bucket.params) {
      const size_t i = index(id);
      views_[i] = slot_view(homes_[index(plan_->slot(id).bucket)], id);
      at::Tensor& grad = grad_of(params_->tensors[i]);
      // What has been accumulated so far moves along. A gradient in memory of its own is absorbed in its time.
      if (!old_views.empty() && grad.defined() && grad.is_same(old_views[i])) {
        views_[i].copy_(grad);
        grad = views_[i];
      }
    }
  }
}

at::ScalarType GradBuffers::grad_type(BucketId id) const { return real_type(first_param(id)); }

bool GradBuffers::is_complex(BucketId id) const { return first_param(id).is_complex(); }

/// Stands for all parameters of the bucket, which have one dtype and device.
const at::Tensor& GradBuffers::first_param(BucketId id) const {
  return params_->tensors[index(plan_->bucket(id).params.front())];
}

void GradBuffers::provide_memory(BucketId id) {
  wire_[index(id)] = allocate(id, wire_types_[index(id)]);
  if (placement_ == GradPlacement::kOwnMemory) return;
  homes_[index(id)] = casts(id) ? allocate(id, grad_type(id)) : wire_[index(id)];
}

at::Tensor GradBuffers::allocate(BucketId id, at::ScalarType type) const {
  const Bucket& bucket = plan_->bucket(id);
  if (bucket.sparse) return {};  // the gradient itself is sent
  // Zeros, because gaps between slots travel with the bucket.
  return at::zeros({bucket.numel}, first_param(id).options().dtype(type).requires_grad(std::nullopt));
}

at::Tensor GradBuffers::stand_in(BucketId id, double value) const {
  if (!plan_->bucket(id).sparse) return allocate(id, wire_types_[index(id)]).fill_(value);
  const at::Tensor& param = first_param(id);
  if (value == 0.0 || param.size(0) == 0) return empty_sparse_like(param);
  const at::Tensor first_row = at::full_like(param.narrow(0, 0, 1), value, at::MemoryFormat::Contiguous);
  return at::sparse_coo_tensor(at::zeros({1, 1}, param.options().dtype(at::kLong)), first_row, param.sizes());
}

std::vector<at::Tensor> GradBuffers::in_place_stand_ins(BucketId id, double value) const {
  std::vector<at::Tensor> result;
  for (const ParamId param : plan_->bucket(id).params) {
    if (plan_->slot(param).in_place) result.push_back(empty_grad(param).fill_(value));
  }
  return result;
}

/// In the layout on which all ranks agree.
at::Tensor GradBuffers::empty_grad(ParamId id) const {
  const at::Tensor& param = params_->tensors[index(id)];
  return at::empty_strided(param.sizes(), strides_[index(id)], param.options().requires_grad(std::nullopt));
}

/// The gradient itself; or a copy when it lies in another order, must not change, or belongs to a graph.
at::Tensor GradBuffers::taken_in_place(ParamId id, Presence presence) const {
  const at::NoGradGuard no_grad;
  const at::Tensor& param = params_->tensors[index(id)];
  const at::Tensor& grad = grad_of(param);
  if (!grad.defined() || presence == Presence::kAbsent) return empty_grad(id).zero_();
  check_grad(id, grad, param.device());
  const bool may_change = presence == Presence::kInside && !grad.requires_grad();
  if (!may_change || !in_slot_order(id, grad) || grad.is_conj() || grad.is_neg()) return empty_grad(id).copy_(grad);
  // Whoever saved this gradient must be able to notice.
  grad.unsafeGetTensorImpl()->bump_version();
  return grad;
}

/// What was reduced where it lay, or in a copy, becomes the gradient.
void GradBuffers::hand_over(ParamId id, bool keep) {
  const at::NoGradGuard no_grad;
  const at::Tensor mean = std::exchange(in_place_[index(id)], at::Tensor());
  at::Tensor& grad = grad_of(params_->tensors[index(id)]);
  if (keep || grad.is_same(mean)) return;
  if (grad.defined()) {
    grad.copy_(mean);
  } else {
    grad = mean;
  }
}

at::Tensor GradBuffers::slot_view(const at::Tensor& flat, ParamId id) const {
  if (plan_->slot(id).in_place) return in_place_[index(id)];
  const at::Tensor& param = params_->tensors[index(id)];
  const int64_t offset = flat.storage_offset() + plan_->slot(id).offset;
  const bool same = flat.scalar_type() == real_type(param);  // else real: complex gradients are never cast
  // Not an autograd view: `detach_` and other in-place changes of a gradient stay legal.
  at::Tensor view = at::empty({0}, flat.options().dtype(same ? param.scalar_type() : flat.scalar_type()));
  view.set_(flat.storage(), offset / reals_per_element(param), param.sizes(), strides_[index(id)]);
  return view;
}

void GradBuffers::check_grad(ParamId id, const at::Tensor& grad, at::Device device) const {
  const at::Tensor& param = params_->tensors[index(id)];
  if (grad.scalar_type() != param.scalar_type()) {
    fail(Code::kGradientChanged, "the gradient of {} has dtype {}, but its bucket expects {}. {}.", params_->label(id),
         c10::toString(grad.scalar_type()), c10::toString(param.scalar_type()), kWhyDtypesMatter);
  }
  if (grad.layout() != at::kStrided) {
    fail(Code::kGradientLayout,
         "the gradient of {} is sparse, but a dense one was expected. A parameter gets a bucket for sparse gradients "
         "when its module is an Embedding or EmbeddingBag with sparse=True and uses it alone.",
         params_->label(id));
  }
  if (grad.device() != device || grad.numel() != param.numel()) {
    fail(Code::kGradientChanged, "the gradient of {} has {} elements on {}, but its bucket expects {} on {}. {}.",
         params_->label(id), grad.numel(), grad.device().str(), param.numel(), device.str(), kWhyDtypesMatter);
  }
}

bool GradBuffers::in_slot_order(ParamId id, const at::Tensor& grad) const {
  return grad.numel() <= 1 || same_order(grad.sizes(), grad.strides(), strides_[index(id)]);
}

/// Describes one straight copy. A gradient that lies in another order is moved first.
Segment GradBuffers::segment_of(ParamId id, Direction direction, const at::Tensor& flat) {
  at::Tensor& grad = grad_of(params_->tensors[index(id)]);
  Segment segment{.grad = nullptr, .offset = plan_->slot(id).offset, .numel = plan_->slot(id).numel};
  if (!grad.defined()) {
    if (direction == Direction::kAbsorb) return segment;
    grad = empty_grad(id);
  }
  check_grad(id, grad, flat.device());
  if (!in_slot_order(id, grad) || grad.is_conj() || grad.is_neg()) return moved(id, direction, flat);
  segment.grad = const_cast<void*>(grad.const_data_ptr());
  return segment;
}

/// Moves a gradient that lies in another order through a view of its slot, to be scaled there; or, when it is to be
/// cast too, to a place of its own, because scaling must come before the cast.
Segment GradBuffers::moved(ParamId id, Direction direction, const at::Tensor& flat) {
  const at::NoGradGuard no_grad;
  const Slot& slot = plan_->slot(id);
  at::Tensor& grad = grad_of(params_->tensors[index(id)]);
  Segment segment{.grad = nullptr, .offset = slot.offset, .numel = slot.numel};
  at::Tensor view = slot_view(flat, id);
  if (direction == Direction::kPublish) {
    grad.copy_(view);
  } else if (casts(slot.bucket)) {
    reordered_.push_back(at::empty_strided(grad.sizes(), strides_[index(id)], grad.options()).copy_(grad));
    segment.grad = reordered_.back().mutable_data_ptr();
  } else {
    view.copy_(grad);
    segment.grad = view.mutable_data_ptr();
  }
  return segment;
}

void GradBuffers::absorb(BucketId id, double scale, const PresenceOf& presence) {
  const Bucket& bucket = plan_->bucket(id);
  if (bucket.sparse) return absorb_sparse(id, scale);
  const bool views = placement_ == GradPlacement::kBucketView;
  if (!wire_[index(id)].defined()) provide_memory(id);
  const at::Tensor& flat = wire_[index(id)];
  segments_.clear();
  for (const ParamId param : bucket.params) {
    const Presence here = presence ? presence(param) : Presence::kInside;
    if (plan_->slot(param).in_place) {
      in_place_[index(param)] = taken_in_place(param, here);
      if (scale != 1.0) in_place_[index(param)].mul_(scale);
      continue;
    }
    if (here == Presence::kAbsent) {
      segments_.push_back({.grad = nullptr, .offset = plan_->slot(param).offset, .numel = plan_->slot(param).numel});
      continue;
    }
    if (views && here == Presence::kOutside) move_out(param);
    segments_.push_back(segment_of(param, Direction::kAbsorb, flat));
  }
  if (casts(id)) {
    pack_cast(flat, segments_, grad_type(id), scale);
    reordered_.clear();
  } else {
    pack(flat, segments_, scale);
  }
  if (!views) return;
  for (const ParamId param : bucket.params) {
    at::Tensor& grad = grad_of(params_->tensors[index(param)]);
    if (grad.defined() && (!presence || presence(param) == Presence::kInside)) grad = views_[index(param)];
  }
}

/// Gives a gradient that lies in its bucket memory of its own.
void GradBuffers::move_out(ParamId id) {
  at::Tensor& grad = grad_of(params_->tensors[index(id)]);
  if (grad.defined() && grad.is_same(views_[index(id)])) grad = grad.detach().clone();
}

void GradBuffers::absorb_sparse(BucketId id, double scale) {
  const ParamId param = plan_->bucket(id).params.front();
  const at::Tensor& grad = grad_of(params_->tensors[index(param)]);
  if (!grad.defined()) {
    wire_[index(id)] = empty_sparse_like(params_->tensors[index(param)]);
    return;
  }
  if (grad.layout() != at::kSparse) {
    fail(Code::kGradientLayout,
         "the gradient of {} is dense, but a sparse one was expected because its module has sparse=True. The other "
         "ranks send a sparse one, so this step cannot finish. Use the parameter only in that module, or sparse=False.",
         params_->label(param));
  }
  wire_[index(id)] = grad.detach().mul(scale);
}

void GradBuffers::publish(BucketId id, const at::Tensor& mean, const Predicate& keep) {
  const Bucket& bucket = plan_->bucket(id);
  if (bucket.sparse) {
    const ParamId param = bucket.params.front();
    if (!(keep && keep(param))) grad_of(params_->tensors[index(param)]) = mean;
    return;
  }
  if (placement_ == GradPlacement::kBucketView) {
    at::Tensor& flat = homes_[index(id)];
    if (!mean.is_alias_of(flat)) flat.copy_(mean);
    for (const ParamId param : bucket.params) {
      if (!(keep && keep(param))) grad_of(params_->tensors[index(param)]) = views_[index(param)];
    }
    return;
  }
  segments_.clear();
  for (const ParamId param : bucket.params) {
    const bool keeps = keep && keep(param);
    if (plan_->slot(param).in_place) {
      hand_over(param, keeps);
      continue;
    }
    if (keeps) continue;
    const Segment segment = segment_of(param, Direction::kPublish, mean);
    if (segment.grad == nullptr) continue;
    segments_.push_back(segment);
    // The kernel writes behind autograd's back: whoever saved this gradient must be able to notice.
    grad_of(params_->tensors[index(param)]).unsafeGetTensorImpl()->bump_version();
  }
  if (mean.scalar_type() != grad_type(id)) {
    unpack_cast(mean, segments_, grad_type(id));
  } else {
    unpack(mean, segments_);
  }
  if (!keeps_memory()) wire_[index(id)].reset();
}

GradBucket GradBuffers::lend(BucketId id) const {
  std::vector<at::Tensor> in_place;
  for (const ParamId param : plan_->bucket(id).params) {
    if (plan_->slot(param).in_place) in_place.push_back(in_place_[index(param)]);
  }
  return {.id = id,
          .count = plan_->num_buckets(),
          .memory = wire_[index(id)],
          .complex = is_complex(id),
          .in_place = std::move(in_place),
          .owner = this};
}

const BucketMembers& GradBuffers::members(BucketId id) const {
  std::unique_ptr<const BucketMembers>& cached = members_[index(id)];
  if (cached) return *cached;
  const Bucket& bucket = plan_->bucket(id);
  auto members = std::make_unique<BucketMembers>();
  for (const ParamId param : bucket.params) {
    const at::Tensor& tensor = params_->tensors[index(param)];
    if (tensor.numel() == 0) continue;  // hooks need not know how to compress nothing
    members->names.push_back(params_->names[index(param)]);
    members->params.push_back(tensor);
    if (bucket.sparse) continue;
    members->offsets.push_back(static_cast<size_t>(plan_->slot(param).offset));
    members->lengths.push_back(static_cast<size_t>(plan_->slot(param).numel));
    members->sizes.push_back(tensor.sizes().vec());
    if (tensor.is_complex()) members->sizes.back().push_back(2);
  }
  cached = std::move(members);
  return *cached;
}

std::string GradBuffers::describe(BucketId id) const {
  const Bucket& bucket = plan_->bucket(id);
  return fmt::format("bucket {} of {} ({} ... {})", index(id), plan_->num_buckets(),
                     params_->label(bucket.params.front()), params_->label(bucket.params.back()));
}

const BucketMembers& GradBucket::members() const { return owner->members(id); }

std::string GradBucket::describe() const { return owner->describe(id); }

}  // namespace lockstep
