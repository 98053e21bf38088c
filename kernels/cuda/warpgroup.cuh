// Matrix products of a warpgroup (128 threads) and the barriers of pipelines that feed them: Hopper cards
// (sm_90a) only. Elsewhere the functions are empty and nobody launches kernels that call them.
#pragma once
#include "common.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WARPGROUPS
#endif

// Barriers in shared memory that count arrivals in phases, the first of number 0.
SHARED void barrier_init(ulong* barrier, uint arrivals) {
#ifdef WARPGROUPS
    uint at = (uint)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
#endif
}
// After a thread's `barrier_init`s and before the block's synchronization: the copy engine sees them too.
SHARED void barriers_made() {
#ifdef WARPGROUPS
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
SHARED void barrier_arrive(ulong* barrier) {
#ifdef WARPGROUPS
    uint at = (uint)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
#endif
}
// Waits until the phase of this parity is over. For a new barrier, parity 1 is.
SHARED void barrier_wait(ulong* barrier, uint parity) {
#ifdef WARPGROUPS
    uint at = (uint)__cvta_generic_to_shared(barrier);
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra AGAIN;\n}" ::"r"(at), "r"(parity) : "memory");
#endif
}

// The next two are for whole warps, with the same arguments in every lane: one arrival, one copy.

// Arrives, and lets the phase wait for so many bytes of `copy_bulk` besides.
SHARED void barrier_expect(ulong* barrier, uint bytes) {
#ifdef WARPGROUPS
    uint at = (uint)__cvta_generic_to_shared(barrier);
    asm volatile(
        "{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n"
        "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}" ::"r"(at),
        "r"(bytes)
        : "memory");
#endif
}
// Copies to shared memory by the copy engine; bytes and both addresses are multiples of 16. What it brings,
// warpgroup products may read after the barrier's phase.
SHARED void copy_bulk(void* to, const void* from, uint bytes, ulong* barrier) {
#ifdef WARPGROUPS
    uint at = (uint)__cvta_generic_to_shared(to), report = (uint)__cvta_generic_to_shared(barrier);
    asm volatile(
        "{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n"
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];\n}" ::"r"(at),
        "l"(from), "r"(bytes), "r"(report)
        : "memory");
#endif
}

// Arrives when all copies that this thread has started are there; counts like another arrival.
SHARED void copy_async_report(ulong* barrier) {
#ifdef WARPGROUPS
    uint at = (uint)__cvta_generic_to_shared(barrier);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
#endif
}

// Lets warpgroup products read what this thread has stored to shared memory or what copies brought that it
// has waited for.
SHARED void publish_to_products() {
#ifdef WARPGROUPS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Registers of a thread from here on; every warp of a warpgroup calls it. 24 to 240, multiples of 8.
template <int COUNT>
SHARED void more_registers() {
#ifdef WARPGROUPS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
SHARED void fewer_registers() {
#ifdef WARPGROUPS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// Where the second operand lies: rows of 64 halves, 128 bytes each, whose 16-byte chunk c is put at chunk
// c ^ row % 8; the first row at a multiple of 1024 bytes. The next 16 inputs are 2 further (32 bytes).
SHARED ulong operand(const void* rows) {
    ulong at = (ulong)((uint)__cvta_generic_to_shared(rows) & 0x3ffffu) >> 4;
    return at | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Before the first product after registers of the products were written otherwise.
SHARED void products_begin() {
#ifdef WARPGROUPS
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Ends a group of products.
SHARED void products_commit() {
#ifdef WARPGROUPS
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits for all groups of products but the last LEFT.
template <int LEFT>
SHARED void products_wait() {
#ifdef WARPGROUPS
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#endif
}

#define FLOATS_8(d) \
    "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3]), "+f"((d)[4]), "+f"((d)[5]), "+f"((d)[6]), \
        "+f"((d)[7])

// d (+)= a b for 64 outputs by 16 inputs (a: each warp's 16 outputs as in mma.m16n8k16) and so many rows;
// d[4 j + i] is what mma.m16n8k16 has in d[i] for rows 8 j to 8 j + 7. ADD 0: d begins at 0. Nothing may
// touch d or a until the products are waited for.
SHARED void multiply_32(float* d, const uint* a, ulong b, uint add) {
#ifdef WARPGROUPS
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
        : FLOATS_8(d + 0), FLOATS_8(d + 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}

SHARED void multiply_48(float* d, const uint* a, ulong b, uint add) {
#ifdef WARPGROUPS
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %29, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
        "%20, %21, %22, %23}, "
        "{%24, %25, %26, %27}, %28, p, 1, 1, 0;\n}"
        : FLOATS_8(d + 0), FLOATS_8(d + 8), FLOATS_8(d + 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}

SHARED void multiply_64(float* d, const uint* a, ulong b, uint add) {
#ifdef WARPGROUPS
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
        "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
        : FLOATS_8(d + 0), FLOATS_8(d + 8), FLOATS_8(d + 16), FLOATS_8(d + 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}

SHARED void multiply_96(float* d, const uint* a, ulong b, uint add) {
#ifdef WARPGROUPS
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
        "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
        "%39, %40, %41, %42, %43, %44, %45, %46, %47}, "
        "{%48, %49, %50, %51}, %52, p, 1, 1, 0;\n}"
        : FLOATS_8(d + 0), FLOATS_8(d + 8), FLOATS_8(d + 16), FLOATS_8(d + 24), FLOATS_8(d + 32),
          FLOATS_8(d + 40)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}

SHARED void multiply_128(float* d, const uint* a, ulong b, uint add) {
#ifdef WARPGROUPS
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
        "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
        "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, "
        "%58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
        : FLOATS_8(d + 0), FLOATS_8(d + 8), FLOATS_8(d + 16), FLOATS_8(d + 24), FLOATS_8(d + 32),
          FLOATS_8(d + 40), FLOATS_8(d + 48), FLOATS_8(d + 56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}

template <int ROWS>
SHARED void multiply_warpgroup(float* d, const uint* a, ulong b, uint add) {
    static_assert(ROWS == 32 || ROWS == 48 || ROWS == 64 || ROWS == 96 || ROWS == 128,
                  "forms of the product");
    if (ROWS == 32) multiply_32(d, a, b, add);
    if (ROWS == 48) multiply_48(d, a, b, add);
    if (ROWS == 64) multiply_64(d, a, b, add);
    if (ROWS == 96) multiply_96(d, a, b, add);
    if (ROWS == 128) multiply_128(d, a, b, add);
}
