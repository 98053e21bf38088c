// Routed experts, prompt form of Hopper: tiles of rows that chose one expert, listed by `experts_sort`. Three
// kernels: gate and up into scratch; silu(gate) * up and its codes, aligned; down. Compiled for the layer's
// one kind of matrix, STAGES and INNER. Grids of the products: as many blocks as share the card's processors;
// each takes tiles in turn, those of the same rows one after another. See linear_warpgroup.cuh.
#include "linear_warpgroup.cuh"

typedef Kind<KIND0>::Stored Stored;

struct ExpertMatrix {
    Packed weights;
    uint kind;
    uint form;
};

struct ExpertArgs {
    const ExpertMatrix* matrices;  // [gate, up, down][experts]
    const uint* starts;            // [experts + 1] into `order`
    const uint* order;             // pairs by expert
    const uint* tiles;             // count, 0, then pairs of words: expert, first place in `order`
    uint* taken;                   // tiles of the products with gate and up, and with down
    float* gate_up;                // [2][pairs][INNER]
    float* out;                    // [pairs, width]
    AlignedRows in;                // of x
    AlignedRows hidden;            // of pairs, and of each pair whether it is wide (align.cu)
    uint* wide;
    // Codes as they are, of wide pairs at least.
    uchar* plain_codes;
    float* plain_units;
    float* plain_sums;
    uint pairs, k, experts, width, inner, unused;
};

// Tiles of rows by blocks of 128 outputs of MATRICES matrices over the same rows.
template <bool DOWN>
struct ExpertTiles {
    typedef ::Stored Stored;
    static const bool GATHERED = true;
    const ExpertArgs& args;

    SHARED uint cols() const { return DOWN ? args.inner : args.width; }
    SHARED uint outputs() const { return DOWN ? args.width : args.inner; }
    SHARED uint blocks() const { return (outputs() + TILE_OUTPUTS - 1) / TILE_OUTPUTS; }
    SHARED uint all_blocks() const { return DOWN ? blocks() : 2 * blocks(); }
    SHARED uint count() const { return args.tiles[0] * all_blocks(); }
    // Tiles differ in rows: who is done takes the next.
    SHARED uint after(uint) const {
        uint taken = 0;
        if (threadIdx.x % 32 == 0) taken = atomicAdd(args.taken + DOWN, 1u);
        return gridDim.x + __shfl_sync(0xffffffffu, taken, 0);
    }
    SHARED uint which(uint n) const { return DOWN ? 2 : n % all_blocks() / blocks(); }
    SHARED RingTile tile(uint n) const {
        uint expert = args.tiles[2 + 2 * (n / all_blocks())];
        uint first = args.tiles[3 + 2 * (n / all_blocks())];
        uint count = min(args.starts[expert + 1] - first, (uint)RingShape<Stored>::ROWS);
        uint block = n % all_blocks() % blocks();
        const Packed& weights = args.matrices[which(n) * args.experts + expert].weights;
        float* out = DOWN ? args.out : args.gate_up + (ulong)which(n) * args.pairs * args.inner;
        return RingTile{weights, DOWN ? args.hidden : args.in,    args.order + first, DOWN ? 1 : args.k, 0,
                        count,   cols(), block * 8,          outputs(),         out};
    }
};

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1)
    experts_gate_up_warpgroup(const __grid_constant__ ExpertArgs args) {
    extern __shared__ __align__(1024) uchar smem[];
    wait_for_launches_before();
    start_next_launch();
    run_ring(smem, ExpertTiles<false>{args});
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1)
    experts_down_warpgroup(const __grid_constant__ ExpertArgs args) {
    extern __shared__ __align__(1024) uchar smem[];
    wait_for_launches_before();
    start_next_launch();
    run_ring(smem, ExpertTiles<true>{args});
}

// Values of a lane in a slice: quads lane, lane + 32, ...
#define SLICE 1024
#define QUADS ((INNER < SLICE ? INNER + 127 : SLICE) / 128)
#define GROUP_LANES (Stored::GROUP / 4)

struct InnerSlice {
    float values[QUADS][4];
    uint magnitudes[QUADS];
};

// One slice of a pair: silu(gate) * up, and the largest magnitude of each quad's group.
SHARED void load_inner(InnerSlice& s, const float* gate, const float* up, uint first, uint lane) {
    float4 g[QUADS], u[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        uint at = first + (i * 32 + lane) * 4;
        g[i] = u[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (at < INNER) g[i] = *(const float4*)(gate + at), u[i] = *(const float4*)(up + at);
    }
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        float* v = s.values[i];
        v[0] = silu_exact(g[i].x) * u[i].x, v[1] = silu_exact(g[i].y) * u[i].y;
        v[2] = silu_exact(g[i].z) * u[i].z, v[3] = silu_exact(g[i].w) * u[i].w;
        uint magnitude = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) magnitude = max(magnitude, BITS(v[j]) & 0x7fffffffu);
#pragma unroll
        for (uint h = GROUP_LANES / 2; h > 0; h >>= 1)
            magnitude = max(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, h));
        s.magnitudes[i] = magnitude;
    }
}

// A warp a pair.
extern "C" __global__ void __launch_bounds__(256)
    experts_inner_aligned(const __grid_constant__ ExpertArgs args) {
    wait_for_launches_before();
    start_next_launch();
    uint pair = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, wide = 0;
    if (pair >= args.pairs) return;
    const uint groups = INNER / Stored::GROUP, slices = (INNER + SLICE - 1) / SLICE;
    const float* gate = args.gate_up + (ulong)pair * INNER;
    const float* up = gate + (ulong)args.pairs * INNER;
    for (uint slice = 0; slice < slices; slice++) {
        InnerSlice s;
        load_inner(s, gate, up, slice * SLICE, lane);
        // Units are 0, powers of two or NaN, whose bits are above all.
        uint highest = 0, least = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            uint unit = BITS(quantize_unit(14, s.magnitudes[i]));
            highest = max(highest, unit), least = min(least, unit == 0 ? 0xffffffffu : unit);
        }
        highest = __reduce_max_sync(0xffffffffu, highest);
        least = __reduce_min_sync(0xffffffffu, least);
        if (highest == 0) highest = BITS(1.0f);
        bool fault = highest > 0x7f000000u;
        wide |= least != 0xffffffffu && !fault && highest - least > 24u << 23;
        if (lane == 0) put_unit(args.hidden, pair, slice, FLOAT(highest));
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            uint at = slice * SLICE + (i * 32 + lane) * 4;
            float factor = quantize_factor(14, s.magnitudes[i]), sum = 0.0f, code[4];
            uint unit = BITS(quantize_unit(14, s.magnitudes[i]));
            uint below = unit == 0 || fault ? 0 : min((highest - unit) >> 23, 24u);
            float align = FLOAT((127u - below) << 23);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                code[j] = quantize_code(s.values[i][j], factor);
                sum = sum + code[j];
            }
#pragma unroll
            for (uint h = GROUP_LANES / 2; h > 0; h >>= 1) sum = sum + __shfl_xor_sync(0xffffffffu, sum, h);
            if (at >= INNER) continue;
            put_codes(args.hidden, pair, at, half_pair(code[0] * align, code[1] * align));
            put_codes(args.hidden, pair, at + 2, half_pair(code[2] * align, code[3] * align));
            ulong group = (ulong)pair * groups + at / Stored::GROUP;
            bool first = at % Stored::GROUP == 0;
            if (first) put_sum(args.hidden, pair, at / Stored::GROUP, sum * align);
            if (slices == 1 && !wide) continue;
            *(uint2*)(args.plain_codes + ((ulong)pair * INNER + at) * 2) =
                make_uint2(half_pair(code[0], code[1]), half_pair(code[2], code[3]));
            if (first) args.plain_units[group] = FLOAT(unit), args.plain_sums[group] = sum;
        }
    }
    if (lane == 0) args.wide[pair] = wide;
}
