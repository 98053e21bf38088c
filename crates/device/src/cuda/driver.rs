//! The CUDA driver behind a small trait: memory, modules, launches, graphs. All unsafe calls of the device
//! are here.
//!
//! Every call makes the context current first, so a device may move between threads. Work is queued on one
//! stream; an address is valid until its [`super::memory::DeviceMemory`] is dropped, which waits for the
//! stream.

use std::ffi::{CStr, CString, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};

use super::launch::Args;
use super::rehearsal::CardKind;
use crate::DeviceError;

pub(super) type Result<T = ()> = std::result::Result<T, DeviceError>;

/// What a card is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// The vendor's name.
    pub(super) name: String,
    /// What NVRTC calls the architecture, for example `sm_90a`.
    pub(super) arch: String,
    /// Compute capability whose forms of kernels are chosen, for example 90.
    pub(super) capability: u32,
    /// Multiprocessors.
    pub(super) processors: u32,
    /// Bytes of device memory.
    pub(super) memory: u64,
    /// Most bytes of shared memory a block can ask for.
    pub(super) shared_max: u32,
}

impl Facts {
    /// What NVRTC calls the architecture; the `a` forms have the instructions of that generation alone.
    pub(super) fn arch_of(capability: u32) -> String {
        let exact = if capability >= 90 { "a" } else { "" };
        format!("sm_{capability}{exact}")
    }

    /// Does a launch start its prologue before the one before it ends?
    pub(super) fn overlaps_launches(&self) -> bool {
        self.capability >= 90
    }
}

/// A compiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Function(pub(super) usize);

/// A recorded graph, ready to launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GraphExec(pub(super) usize);

/// A kernel with everything its launch needs.
#[derive(Clone, Debug)]
pub(super) struct Prepared {
    pub(super) function: Function,
    pub(super) grid: [u32; 3],
    pub(super) block: u32,
    pub(super) shared: u32,
    pub(super) args: Args,
}

/// Memory of the host that the card reads and writes itself.
#[derive(Debug)]
pub(super) struct Pinned {
    at: *mut u8,
    bytes: usize,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Plain memory for a stand-in; never freed, like that of a driver.
    pub(super) fn leaked(bytes: usize) -> Self {
        Self { at: Box::leak(vec![0u8; bytes].into_boxed_slice()).as_mut_ptr(), bytes }
    }

    /// Its address for the card: that of the host.
    pub(super) fn address(&self) -> u64 {
        self.at as u64
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: `bytes` bytes from `at` on were allocated, zeroed, and live as long as the value.
        unsafe { std::slice::from_raw_parts(self.at, self.bytes) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) }
    }
}

/// What the device asks of a driver. Addresses are device addresses; `stage` names the call in errors.
pub(super) trait Driver: Send + Sync {
    fn facts(&self) -> &Facts;
    /// Will what is uploaded be read? Where not, nobody need make it.
    fn keeps(&self) -> bool {
        true
    }
    /// Zeroed memory.
    fn alloc(&self, stage: &'static str, bytes: usize) -> Result<u64>;
    fn free(&self, address: u64);
    /// Pinned host memory, zeros. Never freed before the driver ends.
    fn pinned(&self, bytes: usize) -> Result<Pinned>;
    /// Queues a copy from pinned memory; the bytes must stay as they are until [`Self::mark`] of it has
    /// passed.
    fn upload_queued(&self, to: u64, from: &Pinned, bytes: usize) -> Result;
    /// Copies from any host memory; it may be changed afterwards.
    fn upload(&self, to: u64, from: &[u8]) -> Result;
    /// Waits for the queue, then copies.
    fn download(&self, from: u64, to: &mut [u8]) -> Result;
    fn fill(&self, to: u64, value: u8, bytes: usize) -> Result;
    fn synchronize(&self) -> Result;
    /// Marks this place of the queue in slot `slot` (0 .. MARKS).
    fn mark(&self, slot: usize) -> Result;
    /// Waits until the queue has passed the slot's last mark.
    fn wait_mark(&self, slot: usize) -> Result;
    /// Loads a compiled image; its functions live as long as the driver.
    fn load(&self, image: &[u8]) -> Result<usize>;
    /// A function of a loaded image, with as much dynamic shared memory allowed as the card has.
    fn function(&self, module: usize, name: &str) -> Result<Function>;
    /// Queues launches. `overlap`: where the card can, each starts its prologue before the one before it
    /// ends.
    fn launch(&self, launches: &[Prepared], overlap: bool) -> Result;
    /// Records what [`Self::launch`] would queue as a graph, without running it; the first `beside` launches,
    /// fewer than all, run beside the others.
    fn record(&self, launches: &[Prepared], overlap: bool, beside: usize) -> Result<GraphExec>;
    fn launch_graph(&self, graph: GraphExec) -> Result;
    fn free_graph(&self, graph: GraphExec);
    /// Free and total bytes of device memory.
    fn memory(&self) -> Result<(u64, u64)>;
}

/// Slots of [`Driver::mark`].
pub(super) const MARKS: usize = 16;

/// Uploads of at least this many bytes go through pinned memory in parts of this size, copied on while the
/// part before is on its way: pageable memory would go at a fraction of the bus.
const PART_BYTES: usize = 16 << 20;
/// Marks of the two parts in flight.
const PART_MARKS: [usize; 2] = [MARKS - 2, MARKS - 1];

/// The driver of one card.
pub(super) struct Card {
    /// Pinned parts of large uploads, made at the first.
    parts: Mutex<Vec<Pinned>>,
    facts: Facts,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// Takes part in recordings alone, with the events where it leaves the stream and comes back.
    side: sys::CUstream,
    turns: [sys::CUevent; 2],
    marks: [sys::CUevent; MARKS],
}

// SAFETY: the driver's handles may be used from any thread; every method sets the current context of its
// thread.
unsafe impl Send for Card {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for Card {}

fn message(result: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver gives a pointer to a constant string, or none.
    let known = unsafe { sys::cuGetErrorString(result, &mut text) } == CUresult::CUDA_SUCCESS;
    if !known || text.is_null() {
        return format!("{result:?}");
    }
    // SAFETY: a string of the driver, ended by zero, never freed.
    format!("{} ({result:?})", unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

fn check(stage: &'static str, result: CUresult) -> Result {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        _ => Err(DeviceError::Failed { stage, message: message(result) }),
    }
}

/// The error of a card that cannot be opened.
pub(super) fn unavailable(ordinal: usize, reason: String) -> DeviceError {
    DeviceError::Unavailable { name: format!("cuda:{ordinal}"), reason }
}

/// Cards of this machine; 0 with a reason where there is no driver.
pub(super) fn cards() -> std::result::Result<usize, String> {
    // SAFETY: looks for the library only.
    if !unsafe { sys::is_culib_present() } {
        return Err("no NVIDIA driver: libcuda was not found; install one, or use --device cpu".into());
    }
    let mut count = 0;
    // SAFETY: the library is there; `count` is written by the second call.
    let result = unsafe {
        match sys::cuInit(0) {
            CUresult::CUDA_SUCCESS => sys::cuDeviceGetCount(&mut count),
            failed => failed,
        }
    };
    match result {
        CUresult::CUDA_SUCCESS => Ok(count as usize),
        failed => Err(format!("the NVIDIA driver does not start: {}", message(failed))),
    }
}

impl Card {
    /// Opens card `ordinal` of the machine.
    pub(super) fn open(ordinal: usize) -> Result<Arc<Self>> {
        Self::open_like(ordinal, None)
    }

    /// Opens it, to be taken for a card of another kind where kernels have forms to choose from.
    pub(super) fn open_like(ordinal: usize, like: Option<CardKind>) -> Result<Arc<Self>> {
        let count = cards().map_err(|reason| unavailable(ordinal, reason))?;
        if ordinal >= count {
            return Err(unavailable(ordinal, format!("{count} CUDA cards here, counted from 0")));
        }
        let mut card = Self::start(ordinal).map_err(|result| unavailable(ordinal, message(result)))?;
        if let Some(kind) = like {
            let own = card.facts.clone();
            card.facts = Facts { memory: own.memory, arch: own.arch, ..kind.facts() };
        }
        Ok(Arc::new(card))
    }

    fn start(ordinal: usize) -> std::result::Result<Self, CUresult> {
        let done = |result| if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(result) };
        let (mut device, mut context) = (0, null_mut());
        let mut streams = [null_mut(); 2];
        let (mut marks, mut turns) = ([null_mut(); MARKS], [null_mut(); 2]);
        let mut name = [0i8; 128];
        let mut memory = 0;
        // SAFETY: plain driver calls; each writes the place it is given before that place is read.
        unsafe {
            done(sys::cuDeviceGet(&mut device, ordinal as i32))?;
            done(sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device))?;
            done(sys::cuDeviceTotalMem_v2(&mut memory, device))?;
            done(sys::cuDevicePrimaryCtxRetain(&mut context, device))?;
            done(sys::cuCtxSetCurrent(context))?;
            for stream in &mut streams {
                done(sys::cuStreamCreate(stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
            }
            for mark in marks.iter_mut().chain(&mut turns) {
                done(sys::cuEventCreate(mark, sys::CUevent_flags::CU_EVENT_DEFAULT as u32))?;
            }
        }
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: writes `value`.
            done(unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
            Ok::<u32, CUresult>(value as u32)
        };
        // SAFETY: the driver wrote a string ended by zero inside the array.
        let name = unsafe { CStr::from_ptr(name.as_ptr().cast()) }.to_string_lossy().into_owned();
        let capability = 10 * attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
            + attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let facts = Facts {
            name,
            arch: Facts::arch_of(capability),
            capability,
            processors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory: memory as u64,
            shared_max: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        };
        let [stream, side] = streams;
        Ok(Self { parts: Mutex::default(), facts, device, context, stream, side, turns, marks })
    }

    fn bind(&self, stage: &'static str) -> Result {
        // SAFETY: the context lives until drop.
        check(stage, unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Queues one launch; with `overlap` it may start before the one before it ends.
    fn queue(&self, stream: sys::CUstream, launch: &Prepared, overlap: bool) -> Result {
        let mut params = launch.args.pointers();
        // SAFETY: a plain struct, all zeros is a valid value.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared,
            hStream: stream,
            attrs: &mut attribute,
            numAttrs: overlap as u32,
        };
        let function = launch.function.0 as sys::CUfunction;
        // SAFETY: `params` points at one value per parameter, which the driver copies during the call.
        check("launch", unsafe { sys::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), null_mut()) })
    }

    fn queue_all(&self, stream: sys::CUstream, launches: &[Prepared], overlap: bool) -> Result {
        for (at, launch) in launches.iter().enumerate() {
            // The first of a list follows copies, which know nothing of overlapping.
            self.queue(stream, launch, at > 0 && overlap && self.facts.overlaps_launches())?;
        }
        Ok(())
    }

    /// Queues `beside` on the side stream and `launches` on the stream, while both are recorded.
    fn queue_both(&self, beside: &[Prepared], launches: &[Prepared], overlap: bool) -> Result {
        if beside.is_empty() {
            return self.queue_all(self.stream, launches, overlap);
        }
        let [leaves, returns] = self.turns;
        // SAFETY: streams and events of this driver; the stream is being captured.
        unsafe {
            check("graph", sys::cuEventRecord(leaves, self.stream))?;
            check("graph", sys::cuStreamWaitEvent(self.side, leaves, 0))?;
        }
        let queued = self.queue_all(self.side, beside, overlap);
        // SAFETY: as above. The side stream has to come back whatever happened.
        unsafe { check("graph", sys::cuEventRecord(returns, self.side))? };
        let queued = queued.and_then(|()| self.queue_all(self.stream, launches, overlap));
        // SAFETY: as above.
        unsafe { check("graph", sys::cuStreamWaitEvent(self.stream, returns, 0))? };
        queued
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        // SAFETY: handles made in `start`; nothing uses them afterwards. Results do not matter at the end.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            for mark in self.marks.into_iter().chain(self.turns) {
                let _ = sys::cuEventDestroy_v2(mark);
            }
            for stream in [self.side, self.stream] {
                let _ = sys::cuStreamDestroy_v2(stream);
            }
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

impl Driver for Card {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn alloc(&self, stage: &'static str, bytes: usize) -> Result<u64> {
        self.bind(stage)?;
        let mut address = 0;
        // SAFETY: writes `address`.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let device = format!("cuda ({})", self.facts.name);
                return Err(DeviceError::OutOfMemory { stage, bytes: bytes as u64, device });
            }
            result => check(stage, result)?,
        }
        self.fill(address, 0, bytes)?;
        Ok(address)
    }

    fn free(&self, address: u64) {
        // SAFETY: an address of `alloc`, freed once. The call waits for work that may use it. At the end of a
        // context that failed there is nobody to tell.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            let _ = sys::cuMemFree_v2(address);
        }
    }

    fn pinned(&self, bytes: usize) -> Result<Pinned> {
        self.bind("pinned memory")?;
        let mut at = null_mut();
        // SAFETY: writes `at`, then zeros what was allocated.
        unsafe {
            check("pinned memory", sys::cuMemHostAlloc(&mut at, bytes.max(1), 0))?;
            std::ptr::write_bytes(at.cast::<u8>(), 0, bytes);
        }
        Ok(Pinned { at: at.cast(), bytes })
    }

    fn upload_queued(&self, to: u64, from: &Pinned, bytes: usize) -> Result {
        assert!(bytes <= from.bytes, "inside the pinned memory");
        self.bind("upload")?;
        // SAFETY: pinned memory outlives the driver's work; the caller keeps it unchanged until marked.
        check("upload", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.at.cast_const().cast::<c_void>(), bytes, self.stream)
        })
    }

    fn upload(&self, to: u64, from: &[u8]) -> Result {
        if from.len() >= PART_BYTES {
            return self.upload_parts(to, from);
        }
        self.bind("upload")?;
        // SAFETY: the driver stages pageable memory before the call returns.
        check("upload", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast::<c_void>(), from.len(), self.stream)
        })
    }

    fn download(&self, from: u64, to: &mut [u8]) -> Result {
        self.bind("download")?;
        // SAFETY: `to` is as long as said and stays borrowed until the stream is waited for.
        let queued = unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast::<c_void>(), from, to.len(), self.stream)
        };
        check("download", queued)?;
        self.synchronize()
    }

    fn fill(&self, to: u64, value: u8, bytes: usize) -> Result {
        self.bind("fill")?;
        // SAFETY: as above.
        check("fill", unsafe { sys::cuMemsetD8Async(to, value, bytes, self.stream) })
    }

    fn synchronize(&self) -> Result {
        self.bind("wait")?;
        // SAFETY: the stream lives until drop.
        check("wait", unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    fn mark(&self, slot: usize) -> Result {
        self.bind("mark")?;
        // SAFETY: an event and a stream of this driver.
        check("mark", unsafe { sys::cuEventRecord(self.marks[slot], self.stream) })
    }

    fn wait_mark(&self, slot: usize) -> Result {
        self.bind("wait")?;
        // SAFETY: an event of this driver; one never recorded counts as passed.
        check("wait", unsafe { sys::cuEventSynchronize(self.marks[slot]) })
    }

    fn load(&self, image: &[u8]) -> Result<usize> {
        self.bind("load kernels")?;
        let mut module = null_mut();
        // SAFETY: an image made by the compiler, or read from a cache keyed by its source; the driver checks
        // it.
        check("load kernels", unsafe {
            sys::cuModuleLoadData(&mut module, image.as_ptr().cast::<c_void>())
        })?;
        Ok(module as usize)
    }

    fn function(&self, module: usize, name: &str) -> Result<Function> {
        self.bind("load kernels")?;
        let failed = |_| DeviceError::Failed { stage: "load kernels", message: format!("name {name:?}") };
        let c_name = CString::new(name).map_err(failed)?;
        let mut function = null_mut();
        // SAFETY: a module of `load` and a string ended by zero.
        let found =
            unsafe { sys::cuModuleGetFunction(&mut function, module as sys::CUmodule, c_name.as_ptr()) };
        if found != CUresult::CUDA_SUCCESS {
            let message = format!("kernel {name}: {}", message(found));
            return Err(DeviceError::Failed { stage: "load kernels", message });
        }
        let function = Function(function as usize);
        let own = self.attribute(function, sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let room = self.facts.shared_max.saturating_sub(own) as i32;
        let dynamic = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a function of a loaded module.
        check("load kernels", unsafe {
            sys::cuFuncSetAttribute(function.0 as sys::CUfunction, dynamic, room)
        })?;
        Ok(function)
    }

    fn launch(&self, launches: &[Prepared], overlap: bool) -> Result {
        self.bind("launch")?;
        self.queue_all(self.stream, launches, overlap)
    }

    fn record(&self, launches: &[Prepared], overlap: bool, beside: usize) -> Result<GraphExec> {
        self.bind("graph")?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let (mut graph, mut exec) = (null_mut(), null_mut());
        // SAFETY: capture begins and ends on our stream; the graph is freed once its executable form exists.
        unsafe {
            check("graph", sys::cuStreamBeginCapture_v2(self.stream, mode))?;
            let (beside, launches) = launches.split_at(beside);
            let queued = self.queue_both(beside, launches, overlap);
            let ended = check("graph", sys::cuStreamEndCapture(self.stream, &mut graph));
            let made = queued
                .and(ended)
                .and_then(|()| check("graph", sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0)));
            if !graph.is_null() {
                let _ = sys::cuGraphDestroy(graph);
            }
            made?;
        }
        Ok(GraphExec(exec as usize))
    }

    fn launch_graph(&self, graph: GraphExec) -> Result {
        self.bind("graph")?;
        // SAFETY: an executable graph of `record`.
        check("graph", unsafe { sys::cuGraphLaunch(graph.0 as sys::CUgraphExec, self.stream) })
    }

    fn free_graph(&self, graph: GraphExec) {
        // SAFETY: freed once; the driver keeps it until its launches have ended.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            let _ = sys::cuGraphExecDestroy(graph.0 as sys::CUgraphExec);
        }
    }

    fn memory(&self) -> Result<(u64, u64)> {
        self.bind("memory")?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes both.
        check("memory", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }
}

impl Card {
    fn upload_parts(&self, to: u64, from: &[u8]) -> Result {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        while parts.len() < PART_MARKS.len() {
            parts.push(self.pinned(PART_BYTES)?);
        }
        for (at, chunk) in from.chunks(PART_BYTES).enumerate() {
            let slot = at % PART_MARKS.len();
            self.wait_mark(PART_MARKS[slot])?;
            parts[slot].bytes_mut()[..chunk.len()].copy_from_slice(chunk);
            self.upload_queued(to + (at * PART_BYTES) as u64, &parts[slot], chunk.len())?;
            self.mark(PART_MARKS[slot])?;
        }
        Ok(())
    }

    fn attribute(&self, function: Function, attribute: sys::CUfunction_attribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: writes `value`; a function of a loaded module.
        check("load kernels", unsafe {
            sys::cuFuncGetAttribute(&mut value, attribute, function.0 as sys::CUfunction)
        })?;
        Ok(value as u32)
    }
}
