// Rows of codes as linear_warpgroup.cuh wants them: all groups of a slice of 1024 inputs in one unit, the
// largest of theirs. A row whose units lie more than 2^24 apart in a slice does not fit into halves: it is
// marked, and the kernel of other cards does it again.
#include "aligned.cuh"

#define SLICE 1024

struct AlignArgs {
    const uchar* codes;
    const float* units;
    const float* sums;
    AlignedRows to;
    uint* wide;
    uint cols, group;
};

// One block a row, eight inputs a thread; `cols` is a multiple of 64, `group` of 64.
extern "C" __global__ void __launch_bounds__(128) align_rows(const __grid_constant__ AlignArgs args) {
    wait_for_launches_before();
    start_next_launch();
    uint row = blockIdx.x, groups = args.cols / args.group, slices = (args.cols + SLICE - 1) / SLICE;
    uint slice_groups = SLICE / args.group, t = threadIdx.x, lane = t % 32, wide = 0;
    for (uint slice = 0; slice < slices; slice++) {
        uint first = slice * slice_groups, count = min(groups - first, slice_groups);
        const float* units = args.units + (ulong)row * groups + first;
        // Units are 0, powers of two or NaN, whose bits are above all.
        uint own = lane < count ? BITS(units[lane]) : 0;
        uint highest = __reduce_max_sync(0xffffffffu, own);
        uint least = __reduce_min_sync(0xffffffffu, own == 0 ? 0xffffffffu : own);
        if (highest == 0) highest = BITS(1.0f);
        bool fault = highest > 0x7f000000u;
        if (least != 0xffffffffu && !fault && highest - least > 24u << 23) wide = 1;
        if (t == 0)
            put_unit(args.to, row, slice, FLOAT(highest));
        uint at = slice * SLICE + t * 8;
        if (at >= args.cols) continue;
        uint group = at / args.group;
        // By how much the group's unit is below the slice's; groups of zeros as they are.
        uint unit = BITS(units[group - first]);
        uint below = unit == 0 || fault ? 0 : min((highest - unit) >> 23, 24u);
        float factor = FLOAT((127u - below) << 23);
        uint factors = (uint)half_bits(factor) * 0x00010001u;
        uint4 pairs = *(const uint4*)(args.codes + ((ulong)row * args.cols + at) * 2);
        put_codes(args.to, row, at, half_fma(pairs.x, factors, 0));
        put_codes(args.to, row, at + 2, half_fma(pairs.y, factors, 0));
        put_codes(args.to, row, at + 4, half_fma(pairs.z, factors, 0));
        put_codes(args.to, row, at + 6, half_fma(pairs.w, factors, 0));
        if (at % args.group == 0)
            put_sum(args.to, row, group, args.sums[(ulong)row * groups + group] * factor);
    }
    if (t == 0) args.wide[row] = wide;
}
