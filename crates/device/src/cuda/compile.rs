//! Kernel text to machine code with NVRTC, at first use, kept on disk where a folder is given.
//!
//! A file is compiled once for each set of constants. The key of a cached image is a hash of everything that
//! decides its bytes: text, headers, options, architecture, compiler version. A folder of images that were
//! compiled before ([`super::ship`]) is looked at first; its keys leave the version out, for where it is used
//! there may be no compiler.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::Arc;
use std::{fs, process};

use cudarc::nvrtc::sys::{self, nvrtcResult};
use sha2::{Digest, Sha256};

use super::driver::{Driver, Function, Prepared, Result};
use super::launch::{Kernel, Launch};
use super::sources::{FILES, HEADERS, PLAIN_SUMS, mentions};
use crate::DeviceError;

/// Options that the law asks for (`docs/arithmetic.md`, rule 1).
const OPTIONS: [&str; 8] = [
    // Lambdas inside kernels are device code.
    "--device-as-default-execution-space",
    "--std=c++17",
    "--fmad=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ftz=false",
    "--device-int128",
    "--ptxas-options=-v",
];

pub(super) fn failed(message: String) -> DeviceError {
    DeviceError::Failed { stage: "compile kernels", message }
}

/// Version of NVRTC, or why there is none.
pub(super) fn nvrtc_version() -> std::result::Result<(i32, i32), String> {
    // SAFETY: looks for the library only.
    if !unsafe { sys::is_culib_present() } {
        return Err(
            "NVRTC (libnvrtc, the CUDA run-time compiler) was not found; install the CUDA toolkit or \
                    its nvrtc package of the driver's version"
                .into(),
        );
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes both.
    let result = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    match result {
        nvrtcResult::NVRTC_SUCCESS => Ok((major, minor)),
        failed => Err(format!("NVRTC does not start: {failed:?}")),
    }
}

/// Machine code and what the assembler said about it.
#[derive(Default)]
pub(super) struct Compiled {
    pub(super) image: Vec<u8>,
    pub(super) log: String,
}

/// Compiles one kernel file for an architecture.
pub(super) fn compile(file: &str, defines: &[(&str, String)], arch: &str) -> Result<Compiled> {
    nvrtc_version().map_err(failed)?;
    let text = source(file)?;
    let constant = |name: &str| CString::new(name).map_err(|_| failed(format!("{name:?} holds a zero byte")));
    let (text, name) = (constant(text)?, constant(file)?);
    let names = HEADERS.iter().map(|(name, _)| constant(name)).collect::<Result<Vec<_>>>()?;
    let texts = HEADERS.iter().map(|(_, text)| constant(text)).collect::<Result<Vec<_>>>()?;
    let options = options(defines, arch).iter().map(|o| constant(o)).collect::<Result<Vec<_>>>()?;
    let pointers = |all: &[CString]| all.iter().map(|one| one.as_ptr()).collect::<Vec<_>>();
    let (names, texts, options) = (pointers(&names), pointers(&texts), pointers(&options));
    let mut program = null_mut();
    // SAFETY: strings ended by zero, as many as said, alive for the calls; the program is destroyed at the
    // end.
    unsafe {
        let made = sys::nvrtcCreateProgram(
            &mut program,
            text.as_ptr(),
            name.as_ptr(),
            names.len() as i32,
            texts.as_ptr(),
            names.as_ptr(),
        );
        if made != nvrtcResult::NVRTC_SUCCESS {
            return Err(failed(format!("{file}: {made:?}")));
        }
        let compiled = sys::nvrtcCompileProgram(program, options.len() as i32, options.as_ptr());
        let result = if compiled == nvrtcResult::NVRTC_SUCCESS {
            image(program).map(|image| Compiled { image, log: log(program) })
        } else {
            Err(failed(format!("{file} for {arch}: {compiled:?}\n{}", log(program))))
        };
        let _ = sys::nvrtcDestroyProgram(&mut program);
        result
    }
}

fn source(file: &str) -> Result<&'static str> {
    let found = FILES.iter().find(|(name, _)| *name == file);
    found.map(|(_, text)| *text).ok_or_else(|| failed(format!("no kernel file {file}")))
}

fn options(defines: &[(&str, String)], arch: &str) -> Vec<String> {
    let mut options: Vec<String> = OPTIONS.iter().map(|&option| option.to_owned()).collect();
    options.push(format!("--gpu-architecture={arch}"));
    options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    options
}

/// # Safety
/// `program` was compiled.
unsafe fn image(program: sys::nvrtcProgram) -> Result<Vec<u8>> {
    let mut bytes = 0;
    // SAFETY: the first call writes the size, the second that many bytes.
    unsafe {
        let sized = sys::nvrtcGetCUBINSize(program, &mut bytes);
        let mut image = vec![0u8; bytes];
        let read = sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast());
        match (sized, read) {
            (nvrtcResult::NVRTC_SUCCESS, nvrtcResult::NVRTC_SUCCESS) if bytes > 0 => Ok(image),
            other => Err(failed(format!("no machine code: {other:?}"))),
        }
    }
}

/// # Safety
/// `program` is alive.
unsafe fn log(program: sys::nvrtcProgram) -> String {
    let mut bytes = 0;
    // SAFETY: as for `image`; the text ends with a zero.
    unsafe {
        if sys::nvrtcGetProgramLogSize(program, &mut bytes) != nvrtcResult::NVRTC_SUCCESS || bytes == 0 {
            return String::new();
        }
        let mut text = vec![0u8; bytes];
        let _ = sys::nvrtcGetProgramLog(program, text.as_mut_ptr().cast());
        CStr::from_bytes_until_nul(&text).map(|t| t.to_string_lossy().into_owned()).unwrap_or_default()
    }
}

/// The list of variants beside the images of a cache.
const LIST: &str = "kernels.list";

/// Constants of a compilation.
type Defines = Vec<(&'static str, String)>;

/// From a kernel file, its constants and an architecture to machine code.
pub(super) type Compiler = fn(&str, &[(&str, String)], &str) -> Result<Compiled>;

/// Functions of one card, compiled and loaded at first use.
pub(super) struct Kernels {
    driver: Arc<dyn Driver>,
    /// Images that were compiled before.
    shipped: Option<PathBuf>,
    cache: Option<PathBuf>,
    compiler: Compiler,
    /// Whether kernels sum grouped products without the half-precision matrix instruction.
    plain_sums: bool,
    /// Loaded images by file and constants.
    modules: HashMap<(&'static str, Defines), usize>,
    functions: HashMap<Kernel, Function>,
}

impl Kernels {
    /// `cache`: a folder for compiled images, made at first use.
    pub(super) fn new(driver: Arc<dyn Driver>, cache: Option<PathBuf>) -> Self {
        Self::with(driver, cache, compile)
    }

    /// With another compiler.
    pub(super) fn with(driver: Arc<dyn Driver>, cache: Option<PathBuf>, compiler: Compiler) -> Self {
        let (modules, functions) = (HashMap::new(), HashMap::new());
        Self { driver, shipped: None, cache, compiler, plain_sums: false, modules, functions }
    }

    /// Looks for images in a folder that [`super::ship`] filled before it compiles any.
    pub(super) fn shipped(self, shipped: Option<PathBuf>) -> Self {
        Self { shipped, ..self }
    }

    /// From here on kernels sum grouped products without the half-precision matrix instruction.
    pub(super) fn sum_plainly(&mut self) {
        self.plain_sums = true;
        self.modules.clear();
        self.functions.clear();
    }

    /// The function of a kernel.
    pub(super) fn get(&mut self, kernel: &Kernel) -> Result<Function> {
        if let Some(&function) = self.functions.get(kernel) {
            return Ok(function);
        }
        let key = (kernel.file, kernel.defines.clone());
        let module = match self.modules.get(&key) {
            Some(&module) => module,
            None => {
                let image = self.image(kernel.file, &kernel.defines)?;
                let named = |error| failed(format!("{}: {error}", line(kernel.file, &kernel.defines)));
                let module = self.driver.load(&image).map_err(named)?;
                self.modules.insert(key, module);
                module
            }
        };
        let function = self.driver.function(module, kernel.name)?;
        self.functions.insert(kernel.clone(), function);
        Ok(function)
    }

    /// A launch with its function.
    pub(super) fn prepare(&mut self, launch: Launch) -> Result<Prepared> {
        let Launch { kernel, grid, block, shared, args } = launch;
        Ok(Prepared { function: self.get(&kernel)?, grid, block, shared, args })
    }

    fn image(&self, file: &'static str, defines: &[(&'static str, String)]) -> Result<Vec<u8>> {
        let arch = self.driver.facts().arch.clone();
        let mut defines = defines.to_vec();
        let summed_plainly = self.plain_sums && mentions(source(file)?, PLAIN_SUMS);
        defines.extend(summed_plainly.then(|| (PLAIN_SUMS, "1".to_owned())));
        let defines = &defines[..];
        if let Some(folder) = &self.shipped
            && let Ok(image) = fs::read(image_path(folder, &key(None, file, defines, &arch)?))
        {
            return Ok(image);
        }
        self.compiled(file, defines, &arch).map_err(|error| match &self.shipped {
            Some(folder) => {
                let variant = line(file, defines);
                failed(format!(
                    "{variant} for {arch} is not among the kernels of {}: {error}",
                    folder.display()
                ))
            }
            None => error,
        })
    }

    /// From the cache, or compiled now.
    fn compiled(&self, file: &str, defines: &[(&'static str, String)], arch: &str) -> Result<Vec<u8>> {
        let Some(folder) = &self.cache else {
            return Ok((self.compiler)(file, defines, arch)?.image);
        };
        let version = nvrtc_version().map_err(failed)?;
        let path = image_path(folder, &key(Some(version), file, defines, arch)?);
        if let Ok(image) = fs::read(&path) {
            return Ok(image);
        }
        let image = (self.compiler)(file, defines, arch)?.image;
        // The cache only saves time: a folder that cannot be written costs nothing else.
        let _ = keep(&path, &image).and_then(|()| note(folder, file, defines));
        Ok(image)
    }
}

/// Adds a variant to the list of those that were compiled for a cache, for [`super::ship`].
fn note(folder: &Path, file: &str, defines: &[(&str, String)]) -> std::io::Result<()> {
    let mut list = fs::OpenOptions::new().create(true).append(true).open(folder.join(LIST))?;
    list.write_all(format!("{}\n", line(file, defines)).as_bytes())
}

/// A variant as a line of a list.
pub(super) fn line(file: &str, defines: &[(&str, String)]) -> String {
    let constants: String = defines.iter().map(|(name, value)| format!(" {name}={value}")).collect();
    format!("{file}{constants}")
}

pub(super) fn image_path(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{key}.cubin"))
}

/// Hash of all that decides an image's bytes; `version`: the compiler's, where it is known.
pub(super) fn key(
    version: Option<(i32, i32)>,
    file: &str,
    defines: &[(&str, String)],
    arch: &str,
) -> Result<String> {
    let mut hash = Sha256::new();
    let mut add = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    add(&format!("{version:?}"));
    add(source(file)?);
    options(defines, arch).iter().for_each(|option| add(option));
    HEADERS.iter().for_each(|(name, text)| {
        add(name);
        add(text);
    });
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Writes beside the path, then renames, so that no reader sees half a file.
pub(super) fn keep(path: &Path, image: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let part = path.with_extension(format!("part{}", process::id()));
    fs::write(&part, image)?;
    fs::rename(&part, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::tests::device;

    #[test]
    fn kernels_that_came_with_the_program_need_no_compiler() {
        let none: Compiler = |file, _, _| Err(failed(format!("{file}: no compiler")));
        let folder = std::env::temp_dir().join(format!("clary-shipped-{}", process::id()));
        let (cuda, _) = device();
        let kernels = |shipped| Kernels::with(cuda.driver.clone(), None, none).shipped(shipped);
        let defines = [("ROWS", "8".to_owned())];
        let path = image_path(&folder, &key(None, "linear.cu", &defines, "sm_90a").expect("a file"));
        keep(&path, b"image").expect("a folder for a test");
        let with = kernels(Some(folder.clone()));
        assert_eq!(with.image("linear.cu", &defines).expect("is there"), b"image");
        let error = with.image("linear.cu", &[]).expect_err("another variant").to_string();
        assert!(
            error.contains("linear.cu for sm_90a is not among") && error.contains("no compiler"),
            "{error}"
        );
        assert!(with.image("experts.cu", &defines).is_err(), "another file");
        assert!(kernels(None).image("linear.cu", &defines).is_err(), "no folder");
        fs::remove_dir_all(folder).expect("was made above");
    }

    #[test]
    fn compiled_variants_are_noted() {
        let folder = std::env::temp_dir().join(format!("clary-list-{}", process::id()));
        fs::create_dir_all(&folder).expect("a folder for a test");
        note(&folder, "linear.cu", &[("ROWS", "8".to_owned()), ("KINDS", "1".to_owned())]).expect("writes");
        note(&folder, "rows.cu", &[]).expect("writes");
        let list = fs::read_to_string(folder.join(LIST)).expect("written");
        assert_eq!(list, "linear.cu ROWS=8 KINDS=1\nrows.cu\n");
        fs::remove_dir_all(folder).expect("was made above");
    }
}
