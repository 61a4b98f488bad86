// The types of the kernel that the macros of tile.hpp select.

namespace cta {

using namespace cute;
using emulate::Element;
using emulate::Scale;

namespace dtype {
template <class A_, class B_, Element EA, Element EB, Scale S, int V>
struct Base {
  using A = A_;
  using B = B_;
  static constexpr Element a = EA, b = EB;
  static constexpr Scale scale = S;
  static constexpr int vector = V;
};
using namespace cutlass;
struct nvfp4 : Base<nv_float4_t<float_e2m1_t>, nv_float4_t<float_e2m1_t>, Element::e2m1, Element::e2m1, Scale::ue4m3, 16> {};
struct mxfp4 : Base<mx_float4_t<float_e2m1_t>, mx_float4_t<float_e2m1_t>, Element::e2m1, Element::e2m1, Scale::ue8m0, 32> {};
struct mxfp8 : Base<mx_float8_t<float_e4m3_t>, mx_float8_t<float_e4m3_t>, Element::e4m3, Element::e4m3, Scale::ue8m0, 32> {};
struct fp8xmxfp4 : Base<mx_float8_t<float_e4m3_t>, mx_float4_t<float_e2m1_t>, Element::e4m3, Element::e2m1, Scale::ue8m0, 32> {
};
template <class D>
struct Swapped : Base<typename D::B, typename D::A, D::b, D::a, D::scale, D::vector> {};
}  // namespace dtype

using Pair = conditional_t<SWAP, dtype::Swapped<dtype::DTYPE>, dtype::DTYPE>;
using TileShape = Shape<Int<TILE_M>, Int<TILE_N>, Int<TILE_K>>;
using ClusterShape = Shape<_1, _1, _1>;
constexpr bool grouped = GROUPED;
constexpr bool mixed = Pair::a != Pair::b;  // the 4-bit operand is unpacked on its way: rows are multiples of 128 elements

constexpr int alignment(Element e) { return e == Element::e4m3 ? 16 : mixed ? 128 : 32; }
template <class Layout>
using Tag = conditional_t<grouped, Layout*, Layout>;
using Schedule =
    conditional_t<!PINGPONG, cutlass::gemm::collective::KernelScheduleAuto,  // cooperative, as in FlashInfer
                  conditional_t<grouped, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong,
                                cutlass::gemm::KernelTmaWarpSpecializedPingpong>>;

// As FlashInfer has it: the grouped kernel has a source, the dense one none; the output of swapped operands is transposed.
using Source = conditional_t<grouped, cutlass::bfloat16_t, void>;
constexpr bool column_major = SWAP;
using OutputLayout = Tag<conditional_t<column_major, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>>;
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm120, cutlass::arch::OpClassBlockScaledTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, Source, OutputLayout, 8, cutlass::bfloat16_t, OutputLayout,
    8,
    conditional_t<
        PINGPONG,
        conditional_t<grouped, cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong, cutlass::epilogue::TmaWarpSpecialized>,
        conditional_t<grouped, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative,
                      cutlass::epilogue::TmaWarpSpecializedCooperative>>>::CollectiveOp;

using StageCount = conditional_t<
    STAGES != 0, cutlass::gemm::collective::StageCount<STAGES>,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>>;

using Collective = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm120, cutlass::arch::OpClassBlockScaledTensorOp, typename Pair::A, Tag<cutlass::layout::RowMajor>,
    alignment(Pair::a), typename Pair::B, Tag<cutlass::layout::ColumnMajor>, alignment(Pair::b), float, TileShape, ClusterShape,
    StageCount, Schedule>::CollectiveOp;

}  // namespace cta
