//! Opens every file of a model folder and gathers the tensors under canonical names.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry as Slot},
    fs,
    io::ErrorKind,
    ops::Range,
    path::Path,
};

use quant::Bytes;

use crate::{
    Error, Format, Problem, UnsupportedKind, Warning,
    config::{CONFIG_FILE, Config, parse_config},
    container::{self, Entry, StoredDtype, WeightFile},
    formats::Table,
    index::{INDEX_FILE, Index, read_index},
    json,
    locate::Part,
    names,
};

/// The only weights file of a folder without an index.
const SINGLE_FILE: &str = "model.safetensors";
/// The published name of an MTP sidecar.
pub(crate) const SIDECAR_FILE: &str = "mtp-4bit.safetensors";

/// A tensor of a file, known from its header.
#[derive(Debug)]
pub(crate) struct Tensor {
    /// Name as the file spells it.
    pub stored: Box<str>,
    /// Position in [`Folder::files`].
    pub file: usize,
    pub dtype: StoredDtype,
    pub shape: Vec<usize>,
    /// Bytes in the file.
    pub range: Range<usize>,
    /// From an MTP sidecar, which `config.json` does not describe.
    pub sidecar: bool,
}

impl Tensor {
    /// The module path, as the file spells it.
    pub(crate) fn module(&self) -> &str {
        names::split_last(&self.stored).0
    }

    /// All its bytes.
    pub(crate) fn part(&self) -> Part {
        Part { file: self.file, range: self.range.clone() }
    }

    /// The shape is not the one `expected` describes.
    pub(crate) fn shape_problem(&self, expected: String) -> Problem {
        Problem::Shape { tensor: self.stored.to_string(), found: self.shape.clone(), expected }
    }

    /// Requires a shape without empty axes.
    pub(crate) fn expect_shape(&self, shape: &[usize]) -> Result<(), Problem> {
        if self.shape == shape && !shape.contains(&0) {
            return Ok(());
        }
        Err(self.shape_problem(format!("{shape:?}")))
    }

    /// Requires a dtype.
    pub(crate) fn expect_dtype(&self, name: &'static str) -> Result<(), Problem> {
        if self.dtype.name() == name {
            return Ok(());
        }
        let (tensor, found) = (self.stored.to_string(), self.dtype.name());
        Err(Problem::Dtype { tensor, found, expected: name })
    }

    /// Is it a patch embedding of MLX, `[out, time, height, width, channels]`?
    pub(crate) fn is_channels_last(&self) -> bool {
        self.stored.starts_with(names::MLX_VISION) && self.stored.ends_with("patch_embed.proj.weight")
    }
}

/// All tensors of a model folder.
pub(crate) struct Folder {
    pub config: Config,
    pub files: Vec<WeightFile>,
    /// By canonical name; expert layouts keep their spelling.
    pub tensors: HashMap<String, Tensor>,
    pub warnings: Vec<Warning>,
}

impl Folder {
    /// Reads `config.json`, the index and every header, and refuses what section 7 and, by tensor names,
    /// section 8 of `docs/formats.md` refuse.
    pub(crate) fn open(dir: &Path) -> Result<Self, Error> {
        let config = match container::read_limited(dir, CONFIG_FILE, json::CONFIG_BYTES_MAX) {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                return Err(Error::NoConfig(dir.to_owned()));
            }
            bytes => parse_config(&bytes?)?,
        };
        let index = read_index(dir)?;
        let mut warnings = match &config.table {
            Table::AutoRound(table) => table.warnings.clone(),
            _ => Vec::new(),
        };
        let (mut files, mut headers) = open_main(dir, index.as_ref())?;
        if let Some(index) = &index {
            check_index(index, &headers, &mut warnings)?;
        }
        let sidecar = match find_sidecar(dir, &files)? {
            Some(name) => {
                let (file, entries) = WeightFile::open(dir, &name)?;
                files.push(file);
                headers.push(entries);
                Some(files.len() - 1)
            }
            None => None,
        };
        let tensors = gather(&files, headers, index.as_ref(), sidecar, &mut warnings)?;
        refuse_by_tensor(&tensors)?;
        Ok(Self { config, files, tensors, warnings })
    }

    /// The tensor `module.part`.
    pub(crate) fn get(&self, module: &str, part: &str) -> Option<&Tensor> {
        self.tensors.get(&format!("{module}.{part}"))
    }

    /// The tensor `module.part`, which must stand beside `weight` of that module.
    pub(crate) fn beside(
        &self,
        weight: &Tensor,
        module: &str,
        part: &'static str,
    ) -> Result<&Tensor, Problem> {
        let missing = || Problem::Incomplete { module: weight.module().to_owned(), lacks: part };
        self.get(module, part).ok_or_else(missing)
    }

    /// The table of `config.json`.
    pub(crate) fn table(&self) -> &Table {
        &self.config.table
    }

    /// The format `config.json` describes.
    pub(crate) fn format(&self) -> Format {
        self.config.format()
    }

    /// Reads bytes of a file.
    pub(crate) fn bytes(&self, part: &Part) -> Result<Bytes, Problem> {
        let file = &self.files[part.file];
        file.read(part.range.clone()).map_err(|source| Problem::Read {
            file: file.name.clone(),
            at: part.range.start,
            bytes: part.range.len(),
            detail: source.to_string(),
        })
    }
}

type Headers = Vec<Vec<Entry>>;

/// The files of the index, or the single file, with their headers.
fn open_main(dir: &Path, index: Option<&Index>) -> Result<(Vec<WeightFile>, Headers), Error> {
    let Some(index) = index else {
        if matches!(fs::metadata(dir.join(SINGLE_FILE)), Err(e) if e.kind() == ErrorKind::NotFound) {
            return Err(Error::NoWeights(dir.to_owned()));
        }
        let (file, entries) = WeightFile::open(dir, SINGLE_FILE)?;
        return Ok((vec![file], vec![entries]));
    };
    // All absences first: a partial download has sound files too.
    for file in &index.files {
        if matches!(fs::metadata(dir.join(file)), Err(e) if e.kind() == ErrorKind::NotFound) {
            return Err(Error::MissingShard { index: INDEX_FILE, file: file.clone() });
        }
    }
    let opened = index.files.iter().map(|file| WeightFile::open(dir, file));
    Ok(opened.collect::<Result<Vec<_>, _>>()?.into_iter().unzip())
}

/// Index and headers agree, and no tensor is in two files.
fn check_index(index: &Index, headers: &Headers, warnings: &mut Vec<Warning>) -> Result<(), Error> {
    let mut owners: HashMap<&str, usize> = HashMap::new();
    for (file, entries) in headers.iter().enumerate() {
        let mut unnamed = Vec::new();
        for entry in entries {
            if let Some(other) = owners.insert(&entry.name, file) {
                return Err(Error::Duplicate {
                    tensor: entry.name.clone(),
                    first: index.files[other].clone(),
                    second: index.files[file].clone(),
                });
            }
            if !index.tensors.contains_key(&entry.name) {
                unnamed.push(entry.name.clone());
            }
        }
        if !unnamed.is_empty() {
            unnamed.sort_unstable();
            warnings.push(Warning::not_indexed(index.files[file].clone(), unnamed));
        }
    }
    let mut lost: Vec<_> = index.tensors.iter().filter(|(t, f)| owners.get(t.as_str()) != Some(f)).collect();
    lost.sort_unstable();
    match lost.first() {
        Some((tensor, file)) => {
            let (tensor, file) = (tensor.to_string(), index.files[**file].clone());
            Err(Error::NotInFile { tensor, file })
        }
        None => Ok(()),
    }
}

/// The MTP file beside the index, if there is one (section 4).
fn find_sidecar(dir: &Path, files: &[WeightFile]) -> Result<Option<String>, Error> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(Error::io(dir))? {
        let Ok(name) = entry.map_err(Error::io(dir))?.file_name().into_string() else { continue };
        let is_mtp = name.starts_with("mtp") && name.ends_with(".safetensors");
        if is_mtp && files.iter().all(|f| f.name != name) {
            found.push(name);
        }
    }
    found.sort_unstable();
    if found.iter().any(|f| f == SIDECAR_FILE) {
        return Ok(Some(SIDECAR_FILE.to_owned()));
    }
    if found.len() > 1 {
        return Err(Error::Sidecars { files: found });
    }
    Ok(found.pop())
}

/// Moves all entries under their canonical names. MTP tensors of a sidecar replace those of the main files.
fn gather(
    files: &[WeightFile],
    headers: Headers,
    index: Option<&Index>,
    sidecar: Option<usize>,
    warnings: &mut Vec<Warning>,
) -> Result<HashMap<String, Tensor>, Error> {
    let mut tensors: HashMap<String, Tensor> = HashMap::new();
    let mut replaced = 0;
    for (file, entries) in headers.into_iter().enumerate() {
        let is_sidecar = sidecar == Some(file);
        for Entry { name, dtype, shape, range } in entries {
            if !is_sidecar && index.is_some_and(|i| !i.tensors.contains_key(&name)) {
                continue;
            }
            let canonical =
                if is_sidecar { names::canonical_sidecar(&name) } else { names::canonical(&name) };
            if !is_sidecar && sidecar.is_some() && canonical.starts_with(names::MTP) {
                replaced += 1;
                continue;
            }
            let tensor = Tensor { stored: name.into(), file, dtype, shape, range, sidecar: is_sidecar };
            match tensors.entry(canonical) {
                Slot::Vacant(slot) => {
                    slot.insert(tensor);
                }
                Slot::Occupied(slot) => {
                    let place = |t: &Tensor| format!("{} (as {})", files[t.file].name, t.stored);
                    let (first, second) = (place(slot.get()), place(&tensor));
                    return Err(Error::Duplicate { tensor: slot.key().clone(), first, second });
                }
            }
        }
    }
    if let (true, Some(sidecar)) = (replaced > 0, sidecar) {
        warnings.push(Warning::MtpReplaced { sidecar: files[sidecar].name.clone(), tensors: replaced });
    }
    Ok(tensors)
}

/// The rows of section 8 that tensor names and dtypes give away.
fn refuse_by_tensor(tensors: &HashMap<String, Tensor>) -> Result<(), Error> {
    let mut unsupported: Vec<(u8, UnsupportedKind, &str)> = Vec::new();
    let mut problems = Vec::new();
    for (name, tensor) in tensors {
        let (module, last) = names::split_last(name);
        let float8 = tensor.dtype.name().starts_with("F8_");
        let bytes = tensor.dtype.name() == "U8" && matches!(last, "weight" | "weight_packed");
        let byte_weight = || {
            ["weight", "weight_packed"]
                .iter()
                .any(|part| tensors.get(&format!("{module}.{part}")).is_some_and(|t| t.dtype.name() == "U8"))
        };
        let stored = || tensor.module().to_owned();
        match last {
            "weight_scale_2" | "weight_global_scale" | "global_scale" | "input_global_scale" => {
                unsupported.push((0, UnsupportedKind::Nvfp4, &tensor.stored));
            }
            _ if tensor.dtype.name() == "F8_E8M0" => {
                unsupported.push((1, UnsupportedKind::Mxfp, &tensor.stored));
            }
            _ if float8 && byte_weight() => unsupported.push((0, UnsupportedKind::Nvfp4, &tensor.stored)),
            "weight_scale_inv" => unsupported.push((2, UnsupportedKind::Fp8, &tensor.stored)),
            _ if float8 => unsupported.push((2, UnsupportedKind::Fp8, &tensor.stored)),
            "g_idx" | "weight_g_idx" => problems.push(Problem::ActOrder { module: stored() }),
            "weight_zero_point" => problems.push(Problem::Asymmetric { module: stored() }),
            _ if bytes => problems.push(Problem::Dtype {
                tensor: tensor.stored.to_string(),
                found: tensor.dtype.name(),
                expected: "a float or 32-bit words",
            }),
            _ => {}
        }
    }
    if let Some((_, kind, found)) = unsupported.into_iter().min_by_key(|&(rank, _, found)| (rank, found)) {
        return Err(Error::Unsupported { kind, found: format!("tensor {found}") });
    }
    problems.sort_by_key(Problem::to_string);
    Error::first_kind(problems).map_or(Ok(()), Err)
}

/// Canonical names, for counting what nobody asked for.
pub(crate) type Used = HashSet<String>;
