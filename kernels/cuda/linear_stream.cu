// linear of 2 to 32 rows, streamed form: out = x W^T, several grouped matrices of one group length over one
// input in one launch. A block a multiprocessor stays to the end with codes of ROWS rows in its shared memory
// (y: which) and takes an equal part of all tiles in order; a team of warps has a tile, a warp each slice
// (linear_stream.cuh). Compiled for ROWS (8, 16 or 32), COLS (a multiple of 256), WARPS of a block, RING
// stages of a warp, PARTS places for the sums of a team's slices (1 or 2), UNIT_BYTES (16 if a code of the
// launch has two digits, else 8), CODE_GROUP, and the kinds of matrix, of which targets are in order.
#include "linear_stream.cuh"

#define MATRICES_MAX 8
#define SLICES ((COLS + 1023) / 1024)
#define TEAMS (WARPS / SLICES)

struct StreamTarget {
    Packed weights;
    float* out;  // [rows, outputs]
    uint outputs, kind, first_tile, unused;
};

struct StreamArgs {
    InputCodes codes;
    uint rows, count, tiles, row_stride;
    uint x_at, units_at, parts_at, unused;  // shared memory; rings come first
    StreamTarget targets[MATRICES_MAX];
};

SHARED const StreamTarget& target_of(const StreamArgs& args, uint tile) {
    uint which = 0;
    while (which + 1 < args.count && tile >= args.targets[which + 1].first_tile) which++;
    return args.targets[which];
}

// The block's rows: the first of them, and how many.
struct StreamPart {
    uint first, count;
};

// Copies of the rows' codes, and their units, [row][group] with a place more.
SHARED void stage_input(const StreamArgs& args, const StreamPart& part, uchar* smem) {
    const uint chunks = COLS / 8, groups = COLS / CODE_GROUP;
    const uchar* codes = args.codes.codes + (ulong)part.first * COLS * 2;
#pragma unroll 1
    for (uint i = threadIdx.x; i < part.count * chunks; i += blockDim.x)
        copy_async_16(smem + args.x_at + i / chunks * args.row_stride + i % chunks * 16,
                      codes + (ulong)i * 16);
    copy_async_commit();
#pragma unroll 1
    for (uint i = threadIdx.x; i < part.count * groups; i += blockDim.x) {
        uchar* to = smem + args.units_at + (i / groups * (groups + 1) + i % groups) * UNIT_BYTES;
        uint at = part.first * groups + i;
        float unit = args.codes.units[at], sum = args.codes.sums[at];
        if (UNIT_BYTES == 16)
            make_unit(unit, sum, *(WideUnit*)to);
        else
            make_unit(unit, sum, *(Unit*)to);
    }
    copy_async_wait<0>();
    __syncthreads();
}

// Tiles first .. end, all of one kind. `begins`: nothing is staged yet.
template <class S>
SHARED void stream_tiles(const StreamArgs& args, const StreamPart& part, uchar* smem, uint first, uint end,
                         bool begins) {
    typedef WeightRing<S, 1, ROW_TILES, UNIT_BYTES> Weights;
    const uint groups = COLS / CODE_GROUP;
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / SLICES, slice = warp % SLICES;
    uint steps = min((uint)SLICE_STEPS, COLS / STEP - slice * SLICE_STEPS);
    uint stages = steps / Weights::STAGE_STEPS, ahead = first + team, ahead_stage = 0;
    Weights ring;
    ring.stages = smem + warp * (RING * Weights::STAGE_BYTES), ring.lane = lane, ring.next = 0;
    auto fetch = [&]() {
        if (ahead_stage == 0 && ahead < end) {
            const StreamTarget& target = target_of(args, ahead);
            ring.aim(0, target.weights, ahead - target.first_tile, slice, COLS);
        }
        ring.fetch(ahead < end);
        if (++ahead_stage == stages) ahead_stage = 0, ahead += TEAMS;
    };
#pragma unroll
    for (int i = 0; i < RING - 1; i++) fetch();
    if (begins) {
        wait_for_launches_before();
        stage_input(args, part, smem);
    }
    float* parts = (float*)(smem + args.parts_at) + lane;
    const uint room = ROW_TILES * 4 * 32;
    uint turn = 0;
    for (uint tile = first + team; tile < end; tile += TEAMS, turn ^= 1) {
        StreamRows rows;
        rows.codes_step = 8 * args.row_stride, rows.units_step = 8 * (groups + 1) * UNIT_BYTES;
        rows.codes = smem + args.x_at + lane / 4 * args.row_stride + slice * 2048;
#pragma unroll
        for (int i = 0; i < 2; i++)
            rows.units[i] = smem + args.units_at +
                            ((lane % 4 * 2 + i) * (groups + 1) + slice * S::SLICE_GROUPS) * UNIT_BYTES;
        SliceSums<1, ROW_TILES> sums;
        sums.clear();
#pragma unroll 1
        for (uint stage = 0; stage < stages; stage++) {
            const uchar* oldest = ring.oldest();
            fetch();
            ring.template multiply<false>(sums, oldest, rows);
        }
        float* own = parts + (team * PARTS + turn % PARTS) * (SLICES - 1) * room;
        bool whole = sums.gather(own, team, SLICES, slice);
        // With one place for them, the parts were read before the next ones come.
        if (PARTS == 1 && SLICES > 1) team_sync(1 + team, 32 * SLICES);
        if (!whole) continue;
        const StreamTarget& target = target_of(args, tile);
#pragma unroll
        for (int i = 0; i < ROW_TILES * 4; i++) {
            uint row = i / 4 * 8 + lane % 4 * 2 + i % 2;
            uint output = (tile - target.first_tile) * 16 + lane / 4 + i / 2 % 2 * 8;
            if (row < part.count && output < target.outputs)
                target.out[(ulong)(part.first + row) * target.outputs + output] = sums.v[0][i / 4][i % 4];
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * TEAMS * SLICES, 1)
    linear_stream(const __grid_constant__ StreamArgs args) {
    extern __shared__ __align__(128) uchar smem[];
    start_next_launch();
    uint begin = args.tiles * blockIdx.x / gridDim.x, end = args.tiles * (blockIdx.x + 1) / gridDim.x;
    if (begin == end) return wait_for_launches_before();
    StreamPart part = {blockIdx.y * ROWS, min(args.rows - blockIdx.y * ROWS, (uint)ROWS)};
    for (uint from = begin; from < end;) {
        // To the end of the matrices of this kind.
        uint kind = target_of(args, from).kind, to = from;
        for (uint which = 0; which < args.count; which++) {
            uint after = which + 1 < args.count ? args.targets[which + 1].first_tile : args.tiles;
            if (args.targets[which].kind == kind) to = min(after, end);
        }
        // Rings and sums of the tiles before are done with.
        if (from > begin) __syncthreads();
        with_kind(kind, [&](auto of) {
            typedef decltype(of) K;
            if constexpr (!K::DENSE)
                stream_tiles<typename K::Stored>(args, part, smem, from, to, from == begin);
        });
        from = to;
    }
}
