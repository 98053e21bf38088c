// Routed experts of few rows whose matrices are all stored alike: out[pair] = down(silu(gate x) * up x),
// docs/arithmetic.md, expert output. What costs time there is waiting for weights, so one block a
// multiprocessor stays to the end and its warps stream (linear_stream.cuh).
//
// A *share* is an expert with up to 8 of the pairs that chose it. Every block finds all shares itself, with
// ROUTE_VALUES above 0 out of the router's logits, and takes an equal part of all (share, tile) items in
// order. `experts_stream_hidden` computes silu(gate x) * up x: a team of warps has an item, a warp each
// slice. `experts_stream_down` quantizes hidden values of its first shares and multiplies by down; the first
// shares there may be the shared expert's, of consecutive rows. Compiled for ROWS (8), EXPERT_WIDTH and
// EXPERT_INNER (multiples of 256), RING stages of a warp, the matrices' kind, and STAGED (1: the rows' codes
// are copied to shared memory).
#include "linear_stream.cuh"
#include "route.cuh"

#ifndef ROUTE_VALUES
#define ROUTE_VALUES 0
#endif

typedef Kind<KIND0>::Stored Stored;
typedef UnitOf<Stored::WIDE>::Type U;

#define SHARE_ROWS ROWS
// Shares whose hidden values a block has in shared memory at a time.
#define SHARES_STAGED 3
#define WIDTH_SLICES ((EXPERT_WIDTH + 1023) / 1024)
#define INNER_SLICES ((EXPERT_INNER + 1023) / 1024)
#define WARPS_MAX 16

// The expert that every row has (experts_stream_down).
struct SharedExpert {
    Packed down;
    const float* gate;  // [rows, inner]
    const float* up;
    float* inner;  // silu(gate) * up
    float* out;    // [rows, width]
    uint unused, shares;
};

// Shared memory, bytes from its start. Rings come first; before they are used, bitmaps of pairs by expert lie
// there.
struct StreamPlaces {
    uint x_at, units_at, parts_at, ids_at, shares_at, row_stride;
};

struct StreamArgs {
    InputCodes codes;  // of x
    const uint* ids;   // [pairs]
    const float* logits;  // [rows, experts], with ROUTE_VALUES
    uint* picked;         // then: ids and weights [rows, k] to write
    float* pick_weights;
    float* hidden;   // [pairs, inner]
    float* out;      // [pairs, width]
    Packed first[3]; // gate, up, down of expert 0
    ulong stride[3]; // bytes from expert to expert
    uint rows, k, experts, unused;
    StreamPlaces places;
    SharedExpert shared;
};

// Of the shared expert: rows from pairs[0] on.
struct Share {
    uint expert, count;
    ushort pairs[SHARE_ROWS];
};

SHARED Packed expert_matrix(const StreamArgs& args, uint which, uint expert) {
    ulong at = expert * args.stride[which];
    return Packed{(const uint*)((const uchar*)args.first[which].codes + at), args.first[which].params + at};
}

#if ROUTE_VALUES > 0
// Picks of all rows, a warp each, to `ids` [rows, k]. Visible after a barrier.
SHARED void route_rows(const StreamArgs& args, uint* ids) {
    uint lane = threadIdx.x % 32;
    for (uint row = threadIdx.x / 32; row < args.rows; row += blockDim.x / 32) {
        uint id = route_picks<ROUTE_VALUES>(args.logits + (ulong)row * args.experts, args.experts, args.k);
        if (lane < args.k) ids[row * args.k + lane] = id;
    }
}

// Writes the picks and weights of this block's rows, each by one warp.
SHARED void write_picks(const StreamArgs& args, const uint* ids) {
    uint lane = threadIdx.x % 32, number = threadIdx.x / 32;
    for (uint row = blockIdx.x + number * gridDim.x; row < args.rows; row += blockDim.x / 32 * gridDim.x) {
        uint at = row * args.k + lane, id = lane < args.k ? ids[at] : 0;
        float weight = route_weights(args.logits + (ulong)row * args.experts, args.experts, args.k, id);
        if (lane < args.k) args.picked[at] = id, args.pick_weights[at] = weight;
    }
}
#endif

// Lists shares of up to 32 pairs of up to 8 rows, in the order of their first pairs; returns how many.
// Visible afterwards.
SHARED uint list_few(const uint* ids, uint pairs, Share* shares) {
    __shared__ uint total;
    __syncthreads();
    if (threadIdx.x < 32) {
        uint lane = threadIdx.x, id = lane < pairs ? ids[lane] : ~lane;
        uint same = __match_any_sync(0xffffffffu, id);
        bool first = lane < pairs && (same & ((1u << lane) - 1)) == 0;
        uint all = __ballot_sync(0xffffffffu, first);
        if (first) {
            Share& share = shares[__popc(all & ((1u << lane) - 1))];
            share.expert = id, share.count = __popc(same);
            for (uint at = 0; same != 0; same &= same - 1, at++) share.pairs[at] = (ushort)(__ffs(same) - 1);
        }
        if (lane == 0) total = __popc(all);
    }
    __syncthreads();
    return total;
}

// Lists the shares of all experts; returns how many. By all threads, at least as many as experts. Visible
// afterwards.
SHARED uint list_shares(const StreamArgs& args, uchar* smem, Share* shares) {
    __shared__ uint totals[WARPS_MAX];
    uint* ids = (uint*)(smem + args.places.ids_at);
    uint* bitmaps = (uint*)smem;
    uint pairs = args.rows * args.k, words = (pairs + 31) / 32;
#if ROUTE_VALUES > 0
    route_rows(args, ids);
#else
    for (uint i = threadIdx.x; i < pairs; i += blockDim.x) ids[i] = args.ids[i];
#endif
    if (args.rows <= SHARE_ROWS && pairs <= 32) return list_few(ids, pairs, shares);
    for (uint i = threadIdx.x; i < args.experts * words; i += blockDim.x) bitmaps[i] = 0;
    __syncthreads();
    for (uint i = threadIdx.x; i < pairs; i += blockDim.x)
        atomicOr(&bitmaps[ids[i] * words + i / 32], 1u << i % 32);
    __syncthreads();
    uint expert = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = 0;
    const uint* own = bitmaps + expert * words;
    if (expert < args.experts)
        for (uint i = 0; i < words; i++) count += __popc(own[i]);
    uint mine = (count + SHARE_ROWS - 1) / SHARE_ROWS, before = mine;
#pragma unroll
    for (uint h = 1; h < 32; h *= 2) {
        uint other = __shfl_up_sync(0xffffffffu, before, h);
        if (lane >= h) before += other;
    }
    if (lane == 31) totals[warp] = before;
    __syncthreads();
    uint all = 0;
    before -= mine;
    for (uint i = 0; i < blockDim.x / 32; i++) {
        if (i < warp) before += totals[i];
        all += totals[i];
    }
    for (uint i = 0, at = 0; i < words && at < count; i++)
        for (uint bits = own[i]; bits != 0; bits &= bits - 1, at++) {
            Share& share = shares[before + at / SHARE_ROWS];
            if (at % SHARE_ROWS == 0) share.expert = expert, share.count = min(count - at, (uint)SHARE_ROWS);
            share.pairs[at % SHARE_ROWS] = (ushort)(32 * i + __ffs(bits) - 1);
        }
    __syncthreads();
    return all;
}

// The products of a slice: `stages` stages, each with a fetch of one ahead. `one`: of one row, which most
// shares have.
template <class Ring, int MATS, class Fetch>
SHARED void stream_slice(Ring& ring, SliceSums<MATS, 1>& sums, StreamRows& rows, uint stages, bool one,
                         Fetch fetch) {
    if (one) {
#pragma unroll 1
        for (uint stage = 0; stage < stages; stage++) {
            // The ring turns: the place that is filled is the one before the oldest.
            const uchar* oldest = ring.oldest();
            fetch();
            ring.template multiply<true>(sums, oldest, rows);
        }
        return;
    }
#pragma unroll 1
    for (uint stage = 0; stage < stages; stage++) {
        const uchar* oldest = ring.oldest();
        fetch();
        ring.template multiply<false>(sums, oldest, rows);
    }
}

// Copies of the rows' codes are queued.
template <int COLS>
SHARED void queue_rows(uchar* to, uint stride, const InputCodes& in, uint rows) {
    const uint chunks = COLS / 8;
#pragma unroll 1
    for (uint i = threadIdx.x; i < rows * chunks; i += blockDim.x)
        copy_async_16(to + i / chunks * stride + i % chunks * 16, in.codes + (ulong)i * 16);
}

// Units of all rows, by threads from `first` on.
SHARED void stage_units(const StreamArgs& args, uchar* smem, uint first) {
    U* units = (U*)(smem + args.places.units_at);
    const uint groups = EXPERT_WIDTH / Stored::GROUP;
    if (threadIdx.x < first) return;
    for (uint i = threadIdx.x - first; i < args.rows * groups; i += blockDim.x - first)
        make_unit(args.codes.units[i], args.codes.sums[i], units[i / groups * (groups + 1) + i % groups]);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS_MAX, 1)
    experts_stream_hidden(const __grid_constant__ StreamArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    typedef WeightRing<Stored, 2, 1, sizeof(U)> Weights;
    const uint groups = EXPERT_WIDTH / Stored::GROUP, tiles = EXPERT_INNER / 16;
    const uint slices = WIDTH_SLICES, teams = WARPS_MAX / slices;
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / slices, slice = warp % slices;
    const StreamPlaces& at = args.places;
    wait_for_launches_before();
    start_next_launch();
    if (STAGED) queue_rows<EXPERT_WIDTH>(smem + at.x_at, at.row_stride, args.codes, args.rows);
    copy_async_commit();
    // The first warps route.
    if (STAGED) stage_units(args, smem, args.rows < WARPS_MAX ? 32 * args.rows : 0);
    Share* shares = (Share*)(smem + at.shares_at);
    const U* units = (const U*)(smem + at.units_at);
    uint items = list_shares(args, smem, shares) * tiles;
    uint end = items * (blockIdx.x + 1) / gridDim.x, item = items * blockIdx.x / gridDim.x + team;
    // Stages of an item.
    uint steps = min((uint)SLICE_STEPS, EXPERT_WIDTH / STEP - slice * SLICE_STEPS);
    uint stages = steps / Weights::STAGE_STEPS, ahead = item, ahead_stage = 0;
    Weights ring;
    ring.stages = smem + warp * (RING * Weights::STAGE_BYTES), ring.lane = lane, ring.next = 0;
    auto fetch = [&]() {
        if (ahead_stage == 0 && ahead < end) {
            uint expert = shares[ahead / tiles].expert;
#pragma unroll
            for (int m = 0; m < 2; m++)
                ring.aim(m, expert_matrix(args, m, expert), ahead % tiles, slice, EXPERT_WIDTH);
        }
        ring.fetch(ahead < end);
        if (++ahead_stage == stages) ahead_stage = 0, ahead += teams;
    };
#pragma unroll
    for (int i = 0; i < RING - 1; i++) fetch();
#if ROUTE_VALUES > 0
    write_picks(args, (const uint*)(smem + at.ids_at));
#endif
    if (!STAGED) stage_units(args, smem, 0);
    copy_async_wait<RING - 1>();
    __syncthreads();
    float* parts = (float*)(smem + at.parts_at) + team * (2 * (slices - 1) * 8 * 32) + lane;
    for (uint turn = 0; item < end; item += teams, turn ^= 1) {
        const Share& share = shares[item / tiles];
        uint count = share.count, tile = item % tiles;
        auto row_of = [&](uint n) { return share.pairs[min(n, count - 1)] / args.k; };
        StreamRows rows;
        rows.codes = STAGED ? smem + at.x_at + row_of(lane / 4) * at.row_stride
                            : args.codes.codes + (ulong)row_of(lane / 4) * (EXPERT_WIDTH * 2);
        rows.codes += slice * 2048;
#pragma unroll
        for (int i = 0; i < 2; i++)
            rows.units[i] = (const uchar*)(units + row_of(lane % 4 * 2 + i) * (groups + 1) +
                                           slice * Stored::SLICE_GROUPS);
        SliceSums<2, 1> sums;
        sums.clear();
        stream_slice(ring, sums, rows, stages, count == 1, fetch);
        float* own = parts + turn * ((slices - 1) * sums.VALUES * 32);
        if (!sums.gather(own, team, slices, slice)) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint n = lane % 4 * 2 + i % 2;
            if (n >= count) continue;
            args.hidden[(ulong)share.pairs[n] * EXPERT_INNER + tile * 16 + lane / 4 + i / 2 * 8] =
                silu_exact(sums.v[0][0][i]) * sums.v[1][0][i];
        }
    }
}

// Hidden values of shares first .. last to codes and units in shared memory, eight rows a share. Shares below
// `shared` are the shared expert's. By all threads; visible after a barrier.
SHARED void quantize_shares(const StreamArgs& args, uchar* smem, const Share* shares, uint first, uint last,
                            uint own_first) {
    const uint quads = EXPERT_INNER / 4, group = Stored::GROUP, groups = EXPERT_INNER / group;
    U* units = (U*)(smem + args.places.units_at);
#pragma unroll 1
    for (uint i = threadIdx.x; i < (last - first) * SHARE_ROWS * quads; i += blockDim.x) {
        // A warp has 128 values of one row; first rows of all shares come first, for most have no other.
        uint row = i / quads, quad = i % quads, number = first + row % (last - first);
        const Share& share = shares[number];
        row = row / (last - first);
        if (row >= share.count) continue;
        bool is_shared = number < args.shared.shares;
        uint pair = is_shared ? share.pairs[0] + row : share.pairs[row];
        row += (number - first) * SHARE_ROWS;
        ulong from = (ulong)pair * EXPERT_INNER + 4 * quad;
        float4 x = *(const float4*)((is_shared ? args.shared.gate : args.hidden) + from);
        float values[4] = {x.x, x.y, x.z, x.w};
        if (is_shared) {
            float4 up = *(const float4*)(args.shared.up + from);
            values[0] = silu_exact(x.x) * up.x, values[1] = silu_exact(x.y) * up.y;
            values[2] = silu_exact(x.z) * up.z, values[3] = silu_exact(x.w) * up.w;
            // The block with the share's first tile writes them.
            if (own_first <= number * (EXPERT_WIDTH / 16))
                *(float4*)(args.shared.inner + from) =
                    make_float4(values[0], values[1], values[2], values[3]);
        }
        uint magnitude = 0;
        for (int j = 0; j < 4; j++) magnitude = max(magnitude, BITS(values[j]) & 0x7fffffffu);
        for (uint h = group / 8; h > 0; h >>= 1)
            magnitude = max(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, h));
        float factor = quantize_factor(14, magnitude), sum = 0.0f;
        for (int j = 0; j < 4; j++) {
            values[j] = quantize_code(values[j], factor);
            sum = sum + values[j];
        }
        for (uint h = group / 8; h > 0; h >>= 1) sum = sum + __shfl_xor_sync(0xffffffffu, sum, h);
        uint2 codes = make_uint2(half_pair(values[0], values[1]), half_pair(values[2], values[3]));
        *(uint2*)(smem + args.places.x_at + row * args.places.row_stride + 8 * quad) = codes;
        if (quad % (group / 4) == 0)
            make_unit(quantize_unit(14, magnitude), sum, units[row * (groups + 1) + quad / (group / 4)]);
    }
}

// The shared expert's shares, before all others. Visible after a barrier.
SHARED void list_shared(const StreamArgs& args, Share* shares) {
    if (threadIdx.x >= args.shared.shares) return;
    Share& share = shares[threadIdx.x];
    uint row = threadIdx.x * SHARE_ROWS;
    share.expert = 0, share.count = min(args.rows - row, (uint)SHARE_ROWS), share.pairs[0] = (ushort)row;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS_MAX, 1)
    experts_stream_down(const __grid_constant__ StreamArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    typedef WeightRing<Stored, 1, 1, sizeof(U)> Weights;
    const uint groups = EXPERT_INNER / Stored::GROUP, tiles = EXPERT_WIDTH / 16;
    const uint slices = INNER_SLICES, teams = WARPS_MAX / slices;
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / slices, slice = warp % slices;
    const StreamPlaces& at = args.places;
    start_next_launch();
    // The picks, or the logits they come from, were there before experts_stream_hidden began, and it lets
    // this launch begin only after that.
    Share* shares = (Share*)(smem + at.shares_at);
    uint first_routed = args.shared.shares;
    list_shared(args, shares);
    uint items = (list_shares(args, smem, shares + first_routed) + first_routed) * tiles;
    uint end = items * (blockIdx.x + 1) / gridDim.x, begin = items * blockIdx.x / gridDim.x;
    uint item = begin + team;
    uint steps = min((uint)SLICE_STEPS, EXPERT_INNER / STEP - slice * SLICE_STEPS);
    uint stages = steps / Weights::STAGE_STEPS, ahead = item, ahead_stage = 0;
    Weights ring;
    ring.stages = smem + warp * (RING * Weights::STAGE_BYTES), ring.lane = lane, ring.next = 0;
    auto fetch = [&]() {
        if (ahead_stage == 0 && ahead < end) {
            uint number = ahead / tiles;
            Packed m = number < first_routed ? args.shared.down
                                             : expert_matrix(args, 2, shares[number].expert);
            ring.aim(0, m, ahead % tiles, slice, EXPERT_INNER);
        }
        ring.fetch(ahead < end);
        if (++ahead_stage == stages) ahead_stage = 0, ahead += teams;
    };
#pragma unroll
    for (int i = 0; i < RING - 1; i++) fetch();
    wait_for_launches_before();
    const U* units = (const U*)(smem + at.units_at);
    float* parts = (float*)(smem + at.parts_at) + team * (2 * (slices - 1) * 4 * 32) + lane;
    uint turn = 0;
    for (uint first = begin / tiles; first * tiles < end; first += SHARES_STAGED) {
        uint last = min(first + SHARES_STAGED, (end + tiles - 1) / tiles);
        __syncthreads();
        quantize_shares(args, smem, shares, first, last, begin);
        __syncthreads();
        for (; item < min(end, last * tiles); item += teams, turn ^= 1) {
            uint number = item / tiles, tile = item % tiles;
            const Share& share = shares[number];
            uint count = share.count, row = (number - first) * SHARE_ROWS;
            StreamRows rows;
            rows.codes = smem + at.x_at + (row + min(lane / 4, count - 1)) * at.row_stride + slice * 2048;
#pragma unroll
            for (int i = 0; i < 2; i++)
                rows.units[i] =
                    (const uchar*)(units + (row + min(lane % 4 * 2 + i, count - 1)) * (groups + 1) +
                                   slice * Stored::SLICE_GROUPS);
            SliceSums<1, 1> sums;
            sums.clear();
            stream_slice(ring, sums, rows, stages, count == 1, fetch);
            float* own = parts + turn * ((slices - 1) * sums.VALUES * 32);
            if (!sums.gather(own, team, slices, slice)) continue;
            bool is_shared = number < first_routed;
            float* out = is_shared ? args.shared.out : args.out;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint n = lane % 4 * 2 + i % 2;
                if (n >= count) continue;
                uint pair = is_shared ? share.pairs[0] + n : share.pairs[n];
                out[(ulong)pair * EXPERT_WIDTH + tile * 16 + lane / 4 + i / 2 * 8] = sums.v[0][0][i];
            }
        }
    }
}
