//! A folder of images that a program takes along, so that where it runs there need be no compiler.

use std::path::Path;

use super::compile::{Compiler, compile, failed, image_path, keep, key};
use super::driver::Result;
use super::jobs::in_parallel;

/// A line of a list.
#[derive(Debug, PartialEq, Eq)]
struct Variant<'a> {
    /// Architectures it is meant for; empty: all.
    archs: Vec<&'a str>,
    file: &'a str,
    defines: Vec<(&'a str, String)>,
}

impl<'a> Variant<'a> {
    /// `[sm_80,sm_86 ]file.cu[ NAME=VALUE]...`
    fn parse(line: &'a str) -> Result<Self> {
        let unknown = || failed(format!("{line:?}: [ARCH,ARCH] FILE NAME=VALUE ... is expected"));
        let mut words = line.split_whitespace().peekable();
        let archs = words.next_if(|word| word.starts_with("sm_"));
        let archs = archs.map_or_else(Vec::new, |archs| archs.split(',').collect());
        let file = words.next().ok_or_else(unknown)?;
        let define = |word: &'a str| word.split_once('=').map(|(name, value)| (name, value.to_owned()));
        let defines = words.map(define).collect::<Option<_>>().ok_or_else(unknown)?;
        Ok(Self { archs, file, defines })
    }

    fn is_for(&self, arch: &str) -> bool {
        self.archs.is_empty() || self.archs.contains(&arch)
    }
}

/// Compiles the variants of a list for these architectures into a folder that
/// [`super::CudaSettings::kernels`] may name; says how many images there are. A line is a variant as
/// `kernels.list` of a cache of kernels has it; architectures may stand before it, with commas, to which it
/// is then confined.
pub fn ship(list: &str, folder: &Path, archs: &[String]) -> Result<usize> {
    ship_by(list, folder, archs, compile)
}

/// [`ship`], by a compiler, on all processors.
pub(super) fn ship_by(list: &str, folder: &Path, archs: &[String], compiler: Compiler) -> Result<usize> {
    let mut lines: Vec<&str> = list.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.sort_unstable();
    lines.dedup();
    let variants = lines.into_iter().map(Variant::parse).collect::<Result<Vec<_>>>()?;
    let jobs: Vec<(&Variant<'_>, &str)> = variants
        .iter()
        .flat_map(|variant| archs.iter().map(move |arch| (variant, arch.as_str())))
        .filter(|(variant, arch)| variant.is_for(arch))
        .collect();
    let shipped = in_parallel(&jobs, |(variant, arch)| one(variant, arch, folder, compiler))?;
    Ok(shipped.len())
}

fn one(variant: &Variant<'_>, arch: &str, folder: &Path, compiler: Compiler) -> Result {
    let Variant { file, defines, .. } = variant;
    let path = image_path(folder, &key(None, file, defines, arch)?);
    let image = compiler(file, defines, arch)?.image;
    keep(&path, &image).map_err(|error| failed(format!("{}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_architectures_a_file_and_constants() {
        let defines = vec![("ROWS", "8".to_owned()), ("KINDS", "1".to_owned())];
        let variant = Variant::parse("sm_80,sm_90a linear.cu ROWS=8 KINDS=1").expect("a line");
        assert_eq!(variant, Variant { archs: vec!["sm_80", "sm_90a"], file: "linear.cu", defines });
        assert!(variant.is_for("sm_80") && !variant.is_for("sm_86"));
        assert!(Variant::parse("rows.cu").expect("a line").is_for("sm_86"));
        for wrong in ["linear.cu ROWS", "sm_80"] {
            assert!(Variant::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_that_does_not_exist_ends_all() {
        let archs = ["sm_80", "sm_90a"].map(str::to_owned);
        let folder = std::env::temp_dir().join("clary-never-made");
        let error = ship_by("no.cu\nrows.cu", &folder, &archs, |file, _, _| {
            Err(failed(format!("{file}: not compiled here")))
        });
        assert!(error.is_err());
        assert!(!folder.exists());
    }
}
