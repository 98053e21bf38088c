// Routed experts of few rows whose matrices are all stored alike: out[pair] = down(silu(gate x) * up x),
// docs/arithmetic.md, expert output. What costs time there is waiting for weights, so one block a
// multiprocessor stays to the end and its warps stream (linear_stream.cuh).
//
// A *share* is an expert with up to 8 of the pairs that chose it. Every block of `experts_stream_hidden`
// finds all shares itself, with ROUTE_VALUES above 0 out of the router's logits, and takes an equal part of
// all (share, tile) items in order; one block leaves the list to `experts_stream_down`. The first computes
// silu(gate x) * up x: a team of warps has an item, a warp each slice. The other quantizes hidden values of
// its first shares and multiplies by down; the first shares there may be the shared expert's, of consecutive
// rows. Compiled for ROWS (8), EXPERT_WIDTH and EXPERT_INNER (multiples of 256), RING stages of a warp, the
// matrices' kind, STAGED (1: the codes of all rows are copied to shared memory) and HELD (else, if above 0:
// the codes of so many rows of a block's own shares are).
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
// Quads of hidden values that a thread asks for at a time.
#define QUADS_AHEAD 2
#define SHARE_WORDS (sizeof(Share) / 4)

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
    uint* list;  // how many shares, three unused, the shares
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

// Writes the picks and weights of this block's rows, each by one warp, the last one first.
SHARED void write_picks(const StreamArgs& args, const uint* ids) {
    uint lane = threadIdx.x % 32, number = blockDim.x / 32 - 1 - threadIdx.x / 32;
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

// Lists the shares of all experts, the same ones in every block; returns how many. By all threads, at least
// as many as experts. Visible afterwards.
SHARED uint list_shares(const StreamArgs& args, uchar* smem, Share* shares) {
    __shared__ uint totals[WARPS_MAX];
    uint* ids = (uint*)(smem + args.places.ids_at);
    uint pairs = args.rows * args.k, words = (pairs + 31) / 32, experts = args.experts;
    // Pairs of each expert as bits, [words][experts]; then its first share.
    uint *bits = (uint*)smem, *firsts = bits + words * experts;
    uint expert = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = 0;
    for (uint i = threadIdx.x; i < experts * words; i += blockDim.x) bits[i] = 0;
#if ROUTE_VALUES > 0
    route_rows(args, ids);
#else
    for (uint i = threadIdx.x; i < pairs; i += blockDim.x) ids[i] = args.ids[i];
#endif
    if (args.rows <= SHARE_ROWS && pairs <= 32) return list_few(ids, pairs, shares);
    __syncthreads();
    for (uint i = threadIdx.x; i < pairs; i += blockDim.x)
        atomicOr(&bits[i / 32 * experts + ids[i]], 1u << i % 32);
    __syncthreads();
    if (expert < experts)
        for (uint i = 0; i < words; i++) count += __popc(bits[i * experts + expert]);
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
    if (expert < experts) firsts[expert] = before;
    for (uint i = 0; i < mine; i++) {
        shares[before + i].expert = expert;
        shares[before + i].count = min(count - i * SHARE_ROWS, (uint)SHARE_ROWS);
    }
    __syncthreads();
    for (uint i = threadIdx.x; i < pairs; i += blockDim.x) {
        const uint* own = bits + ids[i];
        // Pairs of the expert before this one.
        uint place = __popc(own[i / 32 * experts] & ((1u << i % 32) - 1));
        for (uint word = 0; word < i / 32; word++) place += __popc(own[word * experts]);
        shares[firsts[ids[i]] + place / SHARE_ROWS].pairs[place % SHARE_ROWS] = (ushort)i;
    }
    __syncthreads();
    return all;
}

// Leaves the list to experts_stream_down, by a block that lets that launch begin only afterwards.
SHARED void write_list(const StreamArgs& args, const Share* shares, uint count) {
    for (uint i = threadIdx.x; i < count * SHARE_WORDS; i += blockDim.x)
        args.list[4 + i] = ((const uint*)shares)[i];
    if (threadIdx.x == 0) args.list[0] = count;
    __syncthreads();
    if (threadIdx.x == 0) __threadfence();
    __syncthreads();
}

// Reads it; returns how many shares there are. Visible afterwards.
SHARED uint read_list(const StreamArgs& args, Share* shares) {
    uint count = __ldcg(args.list);
    // No more than pairs, so that nothing waits for the number.
    for (uint i = threadIdx.x; i < args.rows * args.k * SHARE_WORDS; i += blockDim.x)
        ((uint*)shares)[i] = __ldcg(args.list + 4 + i);
    __syncthreads();
    return count;
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

// The rows of a block's shares, of those from `first` on: `count` places in all, of which the leading `held`
// have their codes in shared memory.
struct HeldRows {
    uint first, count, held;
};

// The row at place `n`.
SHARED uint held_row(const StreamArgs& args, const Share* shares, const HeldRows& held, uint n) {
    uint at = held.first;
    for (; n >= shares[at].count; at++) n -= shares[at].count;
    return shares[at].pairs[n] / args.k;
}

// Rows of items begin .. end, a warp each: copies of codes are queued, units come at once.
SHARED HeldRows hold_rows(const StreamArgs& args, uchar* smem, const Share* shares, uint begin, uint end) {
    const uint tiles = EXPERT_INNER / 16, chunks = EXPERT_WIDTH / 8, groups = EXPERT_WIDTH / Stored::GROUP;
    uint lane = threadIdx.x % 32;
    HeldRows held = {begin / tiles, 0, 0};
    for (uint i = held.first; i * tiles < end; i++) {
        held.count += shares[i].count;
        if (held.count <= HELD) held.held = held.count;
    }
    for (uint n = threadIdx.x / 32; n < held.count; n += blockDim.x / 32) {
        uint row = held_row(args, shares, held, n);
        const uchar* from = args.codes.codes + (ulong)row * (EXPERT_WIDTH * 2);
        uchar* to = smem + args.places.x_at + n * args.places.row_stride;
        if (n < held.held)
            for (uint i = lane; i < chunks; i += 32) copy_async_16(to + i * 16, from + i * 16);
        U* units = (U*)(smem + args.places.units_at) + n * (groups + 1);
        for (uint i = lane; i < groups; i += 32)
            make_unit(args.codes.units[row * groups + i], args.codes.sums[row * groups + i], units[i]);
    }
    copy_async_commit();
    return held;
}

// Items `item`, ... of a team, below `end`.
template <class Ring, class Fetch>
SHARED void multiply_hidden(const StreamArgs& args, uchar* smem, const Share* shares, const HeldRows& held,
                            Ring& ring, uint item, uint end, uint stages, Fetch fetch) {
    const uint groups = EXPERT_WIDTH / Stored::GROUP, tiles = EXPERT_INNER / 16;
    const uint slices = WIDTH_SLICES, teams = WARPS_MAX / slices;
    const StreamPlaces& at = args.places;
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / slices, slice = warp % slices;
    const U* units = (const U*)(smem + at.units_at) + slice * Stored::SLICE_GROUPS;
    float* parts = (float*)(smem + at.parts_at) + team * (2 * (slices - 1) * 8 * 32) + lane;
    for (uint turn = 0; item < end; item += teams, turn ^= 1) {
        const Share& share = shares[item / tiles];
        uint count = share.count, tile = item % tiles, before = 0;
        StreamRows rows;
        SliceSums<2, 1> sums;
        sums.clear();
        for (uint i = held.first; HELD > 0 && i < item / tiles; i++) before += shares[i].count;
        auto row_of = [&](uint n) { return share.pairs[min(n, count - 1)] / args.k; };
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint n = lane % 4 * 2 + i, place = HELD > 0 ? before + min(n, count - 1) : row_of(n);
            rows.units[i] = (const uchar*)(units + place * (groups + 1));
        }
        if (STAGED || (HELD > 0 && before + count <= held.held)) {
            uint place = STAGED ? row_of(lane / 4) : before + min(lane / 4, count - 1);
            rows.codes = smem + at.x_at + place * at.row_stride + slice * 2048;
            stream_slice(ring, sums, rows, stages, count == 1, fetch);
        } else {
            rows.codes = args.codes.codes + (ulong)row_of(lane / 4) * (EXPERT_WIDTH * 2) + slice * 2048;
            stream_slice(ring, sums, rows, stages, count == 1, fetch);
        }
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

extern "C" __global__ void __launch_bounds__(32 * WARPS_MAX, 1)
    experts_stream_hidden(const __grid_constant__ StreamArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    typedef WeightRing<Stored, 2, 1, sizeof(U)> Weights;
    const uint tiles = EXPERT_INNER / 16, slices = WIDTH_SLICES, teams = WARPS_MAX / slices;
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, slice = warp % slices;
    const StreamPlaces& at = args.places;
    bool leaves_list = blockIdx.x == 0;
    wait_for_launches_before();
    if (!leaves_list) start_next_launch();
    if (STAGED) queue_rows<EXPERT_WIDTH>(smem + at.x_at, at.row_stride, args.codes, args.rows);
    copy_async_commit();
    // The first warps route.
    if (STAGED) stage_units(args, smem, args.rows < WARPS_MAX ? 32 * args.rows : 0);
    Share* shares = (Share*)(smem + at.shares_at);
    uint listed = list_shares(args, smem, shares), items = listed * tiles;
    uint begin = items * blockIdx.x / gridDim.x, end = items * (blockIdx.x + 1) / gridDim.x;
    // Stages of an item.
    uint steps = min((uint)SLICE_STEPS, EXPERT_WIDTH / STEP - slice * SLICE_STEPS);
    uint stages = steps / Weights::STAGE_STEPS, ahead = begin + warp / slices, ahead_stage = 0;
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
    HeldRows held = {0, 0, 0};
    if (HELD > 0 && begin < end) held = hold_rows(args, smem, shares, begin, end);
    if (!STAGED && HELD == 0) stage_units(args, smem, 0);
    if (leaves_list) {
        write_list(args, shares, listed);
        start_next_launch();
    }
    copy_async_wait<STAGED ? RING - 1 : 0>();
    __syncthreads();
    multiply_hidden(args, smem, shares, held, ring, begin + warp / slices, end, stages, fetch);
#if ROUTE_VALUES > 0
    // Nobody reads them before the next launch but one; the last warps have the fewest items.
    write_picks(args, (const uint*)(smem + at.ids_at));
#endif
}

// Hidden values on their way to codes: a quad of a row, of the shared expert with what they are made of.
struct HiddenQuad {
    uint share, row, quad;
    bool there, is_shared;
    ulong from;
    float4 x, up;

    // Asks for quad `i` of the rows of shares first .. last: a warp has 128 values of one row; first rows of
    // all shares come first, for most have no other.
    SHARED void ask(const StreamArgs& args, const Share* shares, uint first, uint last, uint i) {
        const uint quads = EXPERT_INNER / 4;
        share = first + i / quads % (last - first), row = i / quads / (last - first), quad = i % quads;
        there = row < shares[share].count, is_shared = share < args.shared.shares;
        if (!there) return;
        uint pair = is_shared ? shares[share].pairs[0] + row : shares[share].pairs[row];
        from = (ulong)pair * EXPERT_INNER + 4 * quad;
        x = *(const float4*)((is_shared ? args.shared.gate : args.hidden) + from);
        if (is_shared) up = *(const float4*)(args.shared.up + from);
    }

    // Its codes and, by the first lane of a group, the group's unit, at row `at` of the block.
    SHARED void put(const StreamArgs& args, uchar* smem, uint at, uint own_first) const {
        const uint group = Stored::GROUP, groups = EXPERT_INNER / group;
        float values[4] = {x.x, x.y, x.z, x.w};
        if (is_shared) {
            values[0] = silu_exact(x.x) * up.x, values[1] = silu_exact(x.y) * up.y;
            values[2] = silu_exact(x.z) * up.z, values[3] = silu_exact(x.w) * up.w;
            // The block with the share's first tile writes them.
            if (own_first <= share * (EXPERT_WIDTH / 16))
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
        *(uint2*)(smem + args.places.x_at + at * args.places.row_stride + 8 * quad) = codes;
        U* units = (U*)(smem + args.places.units_at) + at * (groups + 1);
        if (quad % (group / 4) == 0)
            make_unit(quantize_unit(14, magnitude), sum, units[quad / (group / 4)]);
    }
};

// Hidden values of shares first .. last to codes and units in shared memory, eight rows a share. Shares below
// `shared` are the shared expert's. By all threads, QUADS_AHEAD quads asked for at a time; visible after a
// barrier.
SHARED void quantize_shares(const StreamArgs& args, uchar* smem, const Share* shares, uint first, uint last,
                            uint own_first) {
    const uint all = (last - first) * SHARE_ROWS * (EXPERT_INNER / 4);
#pragma unroll 1
    for (uint i = threadIdx.x; i < all; i += QUADS_AHEAD * blockDim.x) {
        HiddenQuad of[QUADS_AHEAD];
#pragma unroll
        for (int n = 0; n < QUADS_AHEAD; n++) {
            of[n].there = false;
            if (i + n * blockDim.x < all) of[n].ask(args, shares, first, last, i + n * blockDim.x);
        }
#pragma unroll
        for (int n = 0; n < QUADS_AHEAD; n++)
            if (of[n].there) of[n].put(args, smem, of[n].row + (of[n].share - first) * SHARE_ROWS, own_first);
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
    // experts_stream_hidden lets this launch begin only after the list was left.
    Share* shares = (Share*)(smem + at.shares_at);
    uint first_routed = args.shared.shares;
    list_shared(args, shares);
    uint items = (read_list(args, shares + first_routed) + first_routed) * tiles;
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
