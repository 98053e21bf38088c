// Routed experts: out[pair] = down(silu(gate x) * up x) for each (row, pick) pair, docs/arithmetic.md, expert
// output.
//
// Each expert's weights are read once for `chunk` pairs that chose it. With many rows `experts_sort` has
// listed the pairs by expert. `experts_hidden` computes silu(gate x) * up x; `experts_down` quantizes it in
// its prologue and multiplies by down. Grid x: blocks of outputs; y: pairs, of which the first that names an
// expert does all of that expert's; or, with a list, experts. Inside a block the work is cut as
// linear_few.cuh says. With ROUTE_VALUES above 0 each block chooses the rows' experts itself, out of the
// router's logits, and the first one writes the picks. `experts_down` may have the shared expert's down in
// blocks of its own. Compiled for ROWS (1, 4), EXPERT_WIDTH, EXPERT_INNER, THREADS and TILES of a block, and
// the kinds of matrix of the layer.
#include "linear_few.cuh"
#include "route.cuh"

#ifndef ROUTE_VALUES
#define ROUTE_VALUES 0
#endif

struct ExpertMatrix {
    Packed weights;
    uint kind;
    uint form;  // gate and up: which of `codes` it reads
};

// The expert that every row has: the first `slots` blocks along y of experts_down do it, `chunk` rows each.
struct SharedExpert {
    Packed down;
    const float* gate;  // [rows, inner]
    const float* up;
    float* inner;  // silu(gate) * up
    float* out;    // [rows, width]
    uint kind, slots;
};

struct ExpertArgs {
    const ExpertMatrix* matrices;  // [gate, up, down][experts]
    const uint* ids;               // [pairs]
    const uint* starts;            // [experts + 1] into `order`
    const uint* order;             // pairs by expert
    const float* x;                // [rows, width]
    float* hidden;                 // [pairs, inner]
    float* out;                    // [pairs, width]
    InputCodes codes[3];           // of x
    Packed first[3];               // gate, up, down of expert 0
    ulong stride[3];               // bytes from expert to expert where all are stored alike, else 0
    uint kind[3], form[3];         // then: theirs
    uint pairs, k, experts;
    uint listed;  // 1: starts and order are there
    uint chunk;   // pairs at a time, at most ROWS
    uint rows;
    FewPlaces places;
    const float* logits;  // [rows, experts], with ROUTE_VALUES
    uint* picked;         // then: ids and weights [rows, k] to write
    float* pick_weights;
    SharedExpert shared;
};

// Where a matrix lies. The table costs a read that the rest waits for.
SHARED ExpertMatrix expert_matrix(const ExpertArgs& args, uint which, uint expert) {
    if (args.stride[which] == 0) return args.matrices[which * args.experts + expert];
    ulong at = expert * args.stride[which];
    ExpertMatrix m;
    m.weights.codes = (const uint*)((const uchar*)args.first[which].codes + at);
    m.weights.params = args.first[which].params + at;
    m.kind = args.kind[which];
    m.form = args.form[which];
    return m;
}

// The pairs of a block: `list` of `count`, all of one expert. Of the shared expert: rows from `first` on.
struct Share {
    const uint* list;
    uint first, count, expert;
};

#define SHARE_MAX 256
// Blocks a multiprocessor: with codes of up to 4 bits and several rows there is room for `few`. One row waits
// less with its codes in registers.
#define EXPERT_BLOCKS(few)              \
    (THREADS > 256 || KINDS > 1   ? 1   \
     : ONE_ROW || (KIND0 & 15) == 0 || (KIND0 & 15) > 4 ? 2 : few)

#if ROUTE_VALUES > 0
// Picks of all rows, a warp each, to `ids` [rows, k]; also to memory if `write`. Visible after a barrier.
SHARED void route_rows(const ExpertArgs& args, uint* ids, bool write) {
    uint lane = threadIdx.x % 32;
    for (uint row = threadIdx.x / 32; row < args.rows; row += THREADS / 32) {
        const float* logits = args.logits + (ulong)row * args.experts;
        uint id = route_picks<ROUTE_VALUES>(logits, args.experts, args.k), at = row * args.k + lane;
        if (lane < args.k) ids[at] = id;
        if (!write) continue;
        float weight = route_weights(logits, args.experts, args.k, id);
        if (lane < args.k) args.picked[at] = id, args.pick_weights[at] = weight;
    }
}
#endif

// Finds the pairs of share `at`; false: nothing to do. `buffer`: 2 SHARE_MAX words of shared memory, for the
// form without a list; visible after a barrier. `write`: picks that are made here go to memory.
SHARED bool find_share(Share& share, const ExpertArgs& args, uint at, uint* buffer, bool write) {
    share.first = 0;
    if (args.listed) {
        share.expert = at;
        uint start = args.starts[share.expert];
        share.list = args.order + start;
        share.count = args.starts[share.expert + 1] - start;
        return share.count > 0;
    }
    const uint* ids = args.ids;
#if ROUTE_VALUES > 0
    route_rows(args, buffer + SHARE_MAX, write);
    __syncthreads();
    ids = buffer + SHARE_MAX;
#endif
    share.expert = ids[at];
    share.list = buffer;
    uint lane = threadIdx.x % 32, count = 0;
    // All are asked for at once.
    uint held[SHARE_MAX / 32];
#pragma unroll
    for (uint i = 0; i < SHARE_MAX / 32; i++) held[i] = 32 * i + lane < args.pairs ? ids[32 * i + lane] : ~0u;
#pragma unroll
    for (uint i = 0; i < SHARE_MAX / 32; i++) {
        uint first = 32 * i, pair = first + lane;
        if (first >= args.pairs) break;
        bool mine = pair < args.pairs && held[i] == share.expert;
        uint found = __ballot_sync(0xffffffffu, mine);
        // An earlier pair's block does this expert.
        if (count == 0 && found != 0 && first + __ffs(found) - 1 < at) return false;
        if (mine && threadIdx.x < 32) buffer[count + __popc(found & ((1u << lane) - 1))] = pair;
        count += __popc(found);
    }
    share.count = count;
    return true;
}

// Slice sums of all outputs, rows and slices of a block's tiles of one matrix, by all threads: parts
// [tile][slice][row of ROWS][16]. Dense matrices have put their results there, as the only slice.
template <int INPUTS>
SHARED void scale_all(float* parts, const uchar* smem, const FewPlaces& at, uint kind_number, uint first_tile,
                      const float* units, uint rows) {
    const uint slices = (INPUTS + 1023) / 1024;
    with_kind(kind_number, [&](auto kind) {
        typedef decltype(kind) K;
        if constexpr (!K::DENSE) {
            typedef typename K::Stored S;
            const float* exact = (const float*)(smem + at.exact_at);
            const uint groups = INPUTS / S::GROUP;
            for_outputs<TILES, slices>(rows, [&](uint tile, uint slice, uint r, uint output) {
                uint own = first_tile + tile;
                parts[((tile * slices + slice) * ROWS + r) * 16 + output] = scale_slice<S, INPUTS>(
                    exact + own * at.exact_bytes / 4, smem + at.params_at + own * at.param_bytes,
                    units + r * groups, units + (ROWS + r) * groups, r, output, slice);
            });
        }
    });
}

// An output's total out of `parts` [slice][row of ROWS][16].
SHARED float total(const float* parts, bool dense, uint slices, uint row, uint output) {
    return dense ? parts[row * 16 + output] : add_slices(parts, slices, row, output);
}

SHARED bool is_dense(uint kind_number) {
    bool dense = false;
    with_kind(kind_number, [&](auto kind) { dense = decltype(kind)::DENSE; });
    return dense;
}

// A block of experts_hidden: its share, the two matrices, and what of its outputs they are asked for.
struct HiddenBlock {
    const ExpertArgs& args;
    const Share& share;
    uchar* smem;
    ExpertMatrix gate, up;
    // Whether they are stored alike, and whether they read the same codes.
    bool dense_gate, dense_up, alike, same_codes;
    uint first_tile, warp, lane;

    static const uint STEPS = (EXPERT_WIDTH + STEP - 1) / STEP, JOBS = (STEPS + JOB_STEPS - 1) / JOB_STEPS;
    static const uint WARPS = THREADS / 32, LAST = (EXPERT_INNER + 15) / 16 - 1;
    static const uint SLICES = (EXPERT_WIDTH + 1023) / 1024, PART = TILES * SLICES * ROWS * 16;

    SHARED HiddenBlock(const ExpertArgs& args_, const Share& share_, uchar* smem_)
        : args(args_), share(share_), smem(smem_) {
        first_tile = blockIdx.x * TILES, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        gate = expert_matrix(args, 0, share.expert), up = expert_matrix(args, 1, share.expert);
        dense_gate = is_dense(gate.kind), dense_up = is_dense(up.kind);
        alike = gate.kind == up.kind && !dense_gate;
        same_codes = alike || gate.form == up.form && !dense_gate;
    }
    SHARED float* parts() const { return (float*)(smem + args.places.sums_at); }
    SHARED float* units(uint which) const {
        float* of_gate = (float*)(smem + args.places.units_at);
        return of_gate + (which == 0 || same_codes ? 0 : 2 * ROWS * args.places.unit_groups);
    }
    // Exact sums of a tile of gate; those of up are TILES tiles further.
    SHARED float* exact(uint tile) const {
        return (float*)(smem + args.places.exact_at) + tile * args.places.exact_bytes / 4;
    }
    SHARED uint exact_of_up() const { return TILES * args.places.exact_bytes / 4; }
    SHARED uint stored_tile(uint tile) const { return min(first_tile + tile, LAST); }

    // Queues the copies of scales, units and code sums, and of codes that both matrices read.
    SHARED void fetch(const Rows& rows, bool first) {
#pragma unroll
        for (uint which = 0; which < 2; which++) {
            const ExpertMatrix& m = which ? up : gate;
            with_kind(m.kind, [&](auto kind) {
                typedef decltype(kind) K;
                if constexpr (!K::DENSE) {
                    typedef typename K::Stored S;
                    uchar* params = smem + args.places.params_at + which * TILES * args.places.param_bytes;
                    for (uint tile = 0; first && tile < TILES; tile++)
                        fetch_params<S, EXPERT_WIDTH>(params + tile * args.places.param_bytes, m.weights,
                                                      stored_tile(tile));
                    if (which == 0 && alike && !ONE_ROW)
                        stage_codes<EXPERT_WIDTH>(smem, args.places.row_stride, args.codes[m.form], rows);
                    if (which == 0 || !same_codes)
                        stage_units<EXPERT_WIDTH / S::GROUP>(units(which), args.codes[m.form], rows);
                }
            });
        }
        copy_async_commit();
    }

    // Sums of several rows by two matrices stored alike: both read the same codes, out of shared memory.
    SHARED void multiply_staged(const Rows& rows) {
        with_kind(gate.kind, [&](auto kind) {
            typedef decltype(kind) K;
            if constexpr (!K::DENSE) {
                Job<typename K::Stored, EXPERT_WIDTH> g, u;
                const uchar* row = smem + (ONE_ROW ? 0 : min(lane / 4, rows.count - 1)) * args.places.row_stride;
                for (uint i = warp; i < TILES * JOBS || i == warp; i += WARPS) {
                    uint tile = i / JOBS, step = i % JOBS * JOB_STEPS;
                    bool there = i < TILES * JOBS;
                    if (there) {
                        g.load_weights(gate.weights, stored_tile(tile), step, lane);
                        u.load_weights(up.weights, stored_tile(tile), step, lane);
                    }
                    if (i == warp) {
                        copy_async_wait<0>();
                        __syncthreads();
                    }
                    if (there) {
                        g.multiply_row(exact(tile), step, lane, row);
                        u.multiply_row(exact(tile) + exact_of_up(), step, lane, row);
                    }
                }
            }
        });
    }

    // Sums of job i of one row by two matrices stored alike: both read the same codes, out of registers.
    SHARED void multiply_both(const Rows& rows, uint i) {
        uint tile = i / JOBS, step = i % JOBS * JOB_STEPS, row = rows.row(min(lane / 4, rows.count - 1));
        with_kind(gate.kind, [&](auto kind) {
            typedef decltype(kind) K;
            if constexpr (!K::DENSE) {
                Job<typename K::Stored, EXPERT_WIDTH> g, u;
                g.load_weights(gate.weights, stored_tile(tile), step, lane);
                u.load_weights(up.weights, stored_tile(tile), step, lane);
                g.load_row(args.codes[gate.form].codes + (ulong)row * EXPERT_WIDTH * 2, step, lane);
                g.multiply(exact(tile), step, lane);
                u.take_row(g);
                u.multiply(exact(tile) + exact_of_up(), step, lane);
            }
        });
    }

    // Sums of job i by matrices of any two kinds, one after the other. A dense one's are its results.
    SHARED void multiply_each(const Rows& rows, uint i) {
        uint tile = i / JOBS, step = i % JOBS * JOB_STEPS, row = rows.row(min(lane / 4, rows.count - 1));
#pragma unroll
        for (uint which = 0; which < 2; which++) {
            const ExpertMatrix& m = which ? up : gate;
            with_kind(m.kind, [&](auto kind) {
                typedef decltype(kind) K;
                if constexpr (!K::DENSE) {
                    Job<typename K::Stored, EXPERT_WIDTH> job;
                    job.load_weights(m.weights, stored_tile(tile), step, lane);
                    job.load_row(args.codes[m.form].codes + (ulong)row * EXPERT_WIDTH * 2, step, lane);
                    job.multiply(exact(tile) + which * exact_of_up(), step, lane);
                } else {
                    for (uint four = i % JOBS; four < 4; four += JOBS) {
                        uint o = four * 4 + lane / 8, output = (first_tile + tile) * 16 + o;
                        float* to = parts() + (which * TILES + tile) * SLICES * ROWS * 16 + o;
                        dense_output<K::DTYPE>(m.weights.params, output, EXPERT_INNER, args.x, EXPERT_WIDTH,
                                               rows, lane, [&](uint n, float value) { to[n * 16] = value; });
                    }
                }
            });
        }
    }

    // Sums to the hidden values of the rows.
    SHARED void finish(const Rows& rows) {
        scale_all<EXPERT_WIDTH>(parts(), smem, args.places, gate.kind, 0, units(0), rows.count);
        scale_all<EXPERT_WIDTH>(parts() + PART, smem, args.places, up.kind, TILES, units(1), rows.count);
        __syncthreads();
        for_outputs<TILES, 1>(rows.count, [&](uint tile, uint, uint r, uint o) {
            uint output = (first_tile + tile) * 16 + o;
            const float* of = parts() + tile * SLICES * ROWS * 16;
            float g = total(of, dense_gate, SLICES, r, o), u = total(of + PART, dense_up, SLICES, r, o);
            if (output < EXPERT_INNER)
                args.hidden[(ulong)rows.index[r] * EXPERT_INNER + output] = silu_exact(g) * u;
        });
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, EXPERT_BLOCKS(3))
    experts_hidden(const __grid_constant__ ExpertArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    __shared__ uint buffer[2 * SHARE_MAX];
    wait_for_launches_before();
    start_next_launch();
    Share share;
    if (!find_share(share, args, blockIdx.y, buffer, blockIdx.x == 0 && blockIdx.y == 0)) return;
    __syncthreads();
    HiddenBlock block(args, share, smem);
    for (uint first = 0; first < share.count; first += args.chunk) {
        Rows rows = {share.list + first, args.k, 0, min(share.count - first, args.chunk)};
        // Scales, units and code sums are asked for first: a copy holds nobody up.
        block.fetch(rows, first == 0);
        if (!ONE_ROW && block.alike) {
            block.multiply_staged(rows);
        } else {
            for (uint i = block.warp; i < TILES * block.JOBS; i += block.WARPS) {
                if (ONE_ROW && block.alike)
                    block.multiply_both(rows, i);
                else
                    block.multiply_each(rows, i);
            }
        }
        copy_async_wait<0>();
        __syncthreads();
        block.finish(rows);
        __syncthreads();
    }
}

// Quantizes the hidden values of the block's pairs (the shared expert's where pairs have no list) in groups
// of GROUP: codes where staged rows lie, units and code sums [row][group]. By all threads; visible after a
// barrier.
template <int GROUP>
SHARED void quantize_hidden(uchar* smem, const ExpertArgs& args, const Rows& pairs) {
    const uint groups = EXPERT_INNER / GROUP, quads = EXPERT_INNER / 4;
    float* units = (float*)(smem + args.places.units_at);
    float* code_sums = units + ROWS * groups;
#pragma unroll 1
    for (uint i = threadIdx.x; i < (pairs.count * quads + 31) / 32 * 32; i += THREADS) {
        uint row = min(i / quads, pairs.count - 1), quad = i % quads;
        ulong from = (ulong)pairs.row(row) * EXPERT_INNER + 4 * quad;
        float4 x = *(const float4*)((pairs.index ? args.hidden : args.shared.gate) + from);
        float values[4] = {x.x, x.y, x.z, x.w};
        if (!pairs.index) {
            float4 up = *(const float4*)(args.shared.up + from);
            values[0] = silu_exact(x.x) * up.x, values[1] = silu_exact(x.y) * up.y;
            values[2] = silu_exact(x.z) * up.z, values[3] = silu_exact(x.w) * up.w;
            if (blockIdx.x == 0 && i < pairs.count * quads)
                *(float4*)(args.shared.inner + from) =
                    make_float4(values[0], values[1], values[2], values[3]);
        }
        uint magnitude = 0;
        for (int j = 0; j < 4; j++) magnitude = max(magnitude, BITS(values[j]) & 0x7fffffffu);
        for (uint h = GROUP / 8; h > 0; h >>= 1)
            magnitude = max(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, h));
        float factor = quantize_factor(14, magnitude), sum = 0.0f;
        for (int j = 0; j < 4; j++) {
            values[j] = quantize_code(values[j], factor);
            sum = sum + values[j];
        }
        for (uint h = GROUP / 8; h > 0; h >>= 1) sum = sum + __shfl_xor_sync(0xffffffffu, sum, h);
        if (i >= pairs.count * quads) continue;
        uint2 codes = make_uint2(half_pair(values[0], values[1]), half_pair(values[2], values[3]));
        *(uint2*)(smem + row * args.places.row_stride + 8 * quad) = codes;
        if (quad % (GROUP / 4) == 0) {
            units[row * groups + quad / (GROUP / 4)] = quantize_unit(14, magnitude);
            code_sums[row * groups + quad / (GROUP / 4)] = sum;
        }
    }
}

// All of a block of experts_down whose matrix is grouped. Its weights were asked for before the launch before
// ended.
template <class S>
SHARED void down_block(const ExpertArgs& args, const Share& share, const Packed& m, uchar* smem) {
    typedef Job<S, EXPERT_INNER> J;
    const uint jobs = J::JOBS, warps = THREADS / 32, slices = (EXPERT_INNER + 1023) / 1024,
               groups = EXPERT_INNER / S::GROUP;
    const FewPlaces& at = args.places;
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint last = (EXPERT_WIDTH + 15) / 16 - 1, first_tile = blockIdx.x * TILES;
    J job;
    if (warp < TILES * jobs)
        job.load_weights(m, min(first_tile + warp / jobs, last), warp % jobs * JOB_STEPS, lane);
#pragma unroll 1
    for (uint tile = 0; tile < TILES; tile++)
        fetch_params<S, EXPERT_INNER>(smem + at.params_at + tile * at.param_bytes, m,
                                      min(first_tile + tile, last));
    copy_async_commit();
    // The shared expert's inputs were there before experts_hidden began, like the picks.
    if (share.list) wait_for_launches_before();
    float* parts = (float*)(smem + at.sums_at);
    float* exact = (float*)(smem + at.exact_at);
    float* out = share.list ? args.out : args.shared.out;
    for (uint first = 0; first < share.count; first += args.chunk) {
        __syncthreads();
        Rows pairs = {share.list ? share.list + first : nullptr, 1, share.first + first,
                      min(share.count - first, args.chunk)};
        quantize_hidden<S::GROUP>(smem, args, pairs);
        __syncthreads();
        const uchar* row = smem + (ONE_ROW ? 0 : min(lane / 4, pairs.count - 1)) * at.row_stride;
        for (uint i = warp; i < TILES * jobs; i += warps) {
            uint tile = i / jobs, step = i % jobs * JOB_STEPS;
            if (i >= warps || first > 0)
                job.load_weights(m, min(first_tile + tile, last), step, lane);
            if (ONE_ROW) {
                job.load_row(row, step, lane);
                job.multiply(exact + tile * at.exact_bytes / 4, step, lane);
            } else {
                job.multiply_row(exact + tile * at.exact_bytes / 4, step, lane, row);
            }
        }
        copy_async_wait<0>();
        __syncthreads();
        const float* units = (const float*)(smem + at.units_at);
        for_outputs<TILES, slices>(pairs.count, [&](uint tile, uint slice, uint r, uint output) {
            uint o = (first_tile + tile) * 16 + output;
            float sum = scale_slice<S, EXPERT_INNER>(
                exact + tile * at.exact_bytes / 4, smem + at.params_at + tile * at.param_bytes,
                units + r * groups, units + (ROWS + r) * groups, r, output, slice);
            if (slices > 1)
                parts[((tile * slices + slice) * ROWS + r) * 16 + output] = sum;
            else if (o < EXPERT_WIDTH)
                out[(ulong)pairs.row(r) * EXPERT_WIDTH + o] = 0.0f + sum;
        });
        if (slices == 1) continue;
        __syncthreads();
        for_outputs<TILES, 1>(pairs.count, [&](uint tile, uint, uint r, uint o) {
            uint output = (first_tile + tile) * 16 + o;
            if (output < EXPERT_WIDTH)
                out[(ulong)pairs.row(r) * EXPERT_WIDTH + output] =
                    add_slices(parts + tile * slices * ROWS * 16, slices, r, o);
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, EXPERT_BLOCKS(4))
    experts_down(const __grid_constant__ ExpertArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    __shared__ uint buffer[2 * SHARE_MAX];
    start_next_launch();
    Share share;
    ExpertMatrix m;
    bool is_shared = blockIdx.y < args.shared.slots;
    if (is_shared) {
        share = Share{nullptr, blockIdx.y * args.chunk, args.chunk, 0};
        share.count = min(args.rows - share.first, args.chunk);
        m.weights = args.shared.down, m.kind = args.shared.kind;
    } else {
        // The picks (or the logits they come from) were there before experts_hidden began, and it lets this
        // launch begin only after that.
        if (!find_share(share, args, blockIdx.y - args.shared.slots, buffer, false)) {
            wait_for_launches_before();
            return;
        }
        __syncthreads();
        m = expert_matrix(args, 2, share.expert);
    }
    with_kind(m.kind, [&](auto kind) {
        typedef decltype(kind) K;
        if constexpr (!K::DENSE) {
            down_block<typename K::Stored>(args, share, m.weights, smem);
        } else {
            wait_for_launches_before();
            uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
            for (uint first = 0; first < share.count; first += args.chunk) {
                Rows pairs = {share.list + first, 1, 0, min(share.count - first, args.chunk)};
                for (uint four = warp; four < TILES * 4; four += THREADS / 32) {
                    uint output = blockIdx.x * TILES * 16 + four * 4 + lane / 8;
                    dense_output<K::DTYPE>(m.weights.params, output, EXPERT_WIDTH, args.hidden, EXPERT_INNER,
                                           pairs, lane, [&](uint n, float value) {
                                               args.out[(ulong)pairs.index[n] * EXPERT_WIDTH + output] =
                                                   value;
                                           });
                }
            }
        }
    });
    if (is_shared) wait_for_launches_before();
}
