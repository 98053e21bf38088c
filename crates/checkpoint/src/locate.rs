//! Finds the parts of a module from headers alone and checks their shapes; no tensor byte is read here.

use std::ops::Range;

use quant::Encoding;

use crate::{
    Format, Problem, Projection,
    folder::{Folder, Tensor, Used},
    formats::{auto_round, compressed_tensors, dense, mlx},
};

/// Bytes of a file.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Position in [`Folder::files`].
    pub file: usize,
    pub range: Range<usize>,
}

/// What stands between the stored bytes and a canonical matrix.
#[derive(Clone, Debug)]
pub(crate) enum Layout {
    /// Nothing: they are the same.
    Rows,
    /// Words and scales with inputs first; zero points that must be the middle.
    Transposed { zeros: Part },
    /// Two 64-bit integers that must be rows and columns.
    Shaped { shape: Part },
    /// A patch embedding whose innermost axis is the channel.
    ChannelsLast { channels: usize },
}

/// One matrix of a checkpoint, found and checked but not read.
#[derive(Clone, Debug)]
pub(crate) struct Module {
    /// Path as the file spells it.
    pub name: String,
    /// Which expert of a stacked tensor.
    pub expert: Option<usize>,
    pub rows: usize,
    pub cols: usize,
    pub encoding: Encoding,
    pub codes: Part,
    pub scales: Option<Part>,
    pub biases: Option<Part>,
    pub layout: Layout,
}

impl Module {
    /// The name for messages.
    pub(crate) fn label(&self) -> String {
        match self.expert {
            Some(expert) => format!("{} expert {expert}", self.name),
            None => self.name.clone(),
        }
    }
}

/// All suffixes of the tensors of a module.
const PARTS: [&str; 8] =
    ["weight", "scales", "biases", "qweight", "qzeros", "weight_packed", "weight_scale", "weight_shape"];

/// Floats of a vector, found and checked.
#[derive(Clone, Debug)]
pub(crate) struct Floats {
    /// Name as the file spells it.
    pub name: String,
    pub dtype: quant::Dtype,
    pub part: Part,
    /// Axes of a stored patch embedding, channels last; the canonical order has them second.
    pub channels_last: Option<[usize; 5]>,
}

/// Finds tensors of a folder and remembers which were found.
pub(crate) struct Locator<'a> {
    pub folder: &'a Folder,
    /// Canonical names of everything found, if somebody wants to know.
    pub used: Option<Used>,
}

impl<'a> Locator<'a> {
    pub(crate) fn new(folder: &'a Folder) -> Self {
        Self { folder, used: None }
    }

    fn mark(&mut self, name: &str) {
        if let Some(used) = &mut self.used {
            used.insert(name.to_owned());
        }
    }

    fn mark_module(&mut self, module: &str) {
        if self.used.is_some() {
            for part in PARTS {
                let name = format!("{module}.{part}");
                if self.folder.tensors.contains_key(&name) {
                    self.mark(&name);
                }
            }
        }
    }

    /// A matrix `[rows, cols]`, or `None` if no part of it is there.
    pub(crate) fn module(
        &mut self,
        module: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Option<Module>, Problem> {
        self.mark_module(module);
        let Some((form, tensor)) = self.form(module)? else { return Ok(None) };
        let size = (rows, cols);
        match form {
            Form::AutoRound => auto_round::locate(self.folder, module, tensor, size),
            Form::CompressedTensors => compressed_tensors::locate(self.folder, module, tensor, size),
            Form::Weight if module.ends_with("patch_embed.proj") => {
                dense::locate_patch_embed(tensor, rows, cols)
            }
            Form::Weight => {
                let list = mlx::locate(self.folder, module, tensor, None, size)?;
                return Ok(list.into_iter().next());
            }
        }
        .map(Some)
    }

    /// How a module is stored, and its main tensor.
    fn form(&self, module: &str) -> Result<Option<(Form, &'a Tensor)>, Problem> {
        let folder = self.folder;
        let has = |part: &str| folder.get(module, part);
        let (weight, qweight, packed) = (has("weight"), has("qweight"), has("weight_packed"));
        let both = |tensor: &Tensor, first, second| {
            Err(Problem::Both { module: tensor.module().to_owned(), first, second })
        };
        let lacks = |other: Option<&Tensor>, lacks| match other {
            Some(other) => Err(Problem::Incomplete { module: other.module().to_owned(), lacks }),
            None => Ok(None),
        };
        match (weight, qweight, packed) {
            (Some(t), Some(_), _) | (Some(t), _, Some(_)) => both(t, "a float", "a packed weight"),
            (_, Some(t), Some(_)) => both(t, "qweight", "weight_packed"),
            (Some(weight), None, None) => {
                let scale = has("scales").or(has("biases")).or(has("weight_scale"));
                if weight.dtype.float().is_some() && scale.is_some() {
                    return both(weight, "a float", "scales of a packed weight");
                }
                if weight.dtype.name() == "U32" && !weight.sidecar {
                    self.same_tool(weight, Format::Mlx)?;
                }
                Ok(Some((Form::Weight, weight)))
            }
            (None, Some(qweight), None) => {
                self.same_tool(qweight, Format::AutoRound)?;
                Ok(Some((Form::AutoRound, qweight)))
            }
            (None, None, Some(packed)) => {
                self.same_tool(packed, Format::CompressedTensors)?;
                Ok(Some((Form::CompressedTensors, packed)))
            }
            (None, None, None) => {
                if let Some(zeros) = has("qzeros") {
                    return lacks(Some(zeros), "qweight");
                }
                if let Some(scale) = has("weight_scale").or(has("weight_shape")) {
                    return lacks(Some(scale), "weight_packed");
                }
                let part = if folder.format() == Format::AutoRound { "qweight" } else { "weight" };
                lacks(has("scales").or(has("biases")), part)
            }
        }
    }

    fn same_tool(&self, tensor: &Tensor, found: Format) -> Result<(), Problem> {
        let format = self.folder.format();
        if format == found {
            return Ok(());
        }
        Err(Problem::Foreign { module: tensor.module().to_owned(), found, format })
    }

    /// One projection of all experts of the `mlp` at `prefix`; `None` if the layer has no experts at all.
    pub(crate) fn experts(
        &mut self,
        prefix: &str,
        projection: Projection,
        experts: usize,
        (rows, cols): (usize, usize),
        needed_by: &str,
    ) -> Result<Option<Vec<Module>>, Vec<Problem>> {
        let folder = self.folder;
        let gate_up = format!("{prefix}.experts.gate_up_proj");
        let down = format!("{prefix}.experts.down_proj");
        let switch = |p: Projection| format!("{prefix}.switch_mlp.{}", p.name());
        let is_stacked = [&gate_up, &down].iter().any(|t| folder.tensors.contains_key(*t));
        let is_switch = Projection::ALL.iter().any(|&p| is_present(folder, &switch(p)));
        let is_split = (0..experts).any(|e| {
            Projection::ALL.iter().any(|&p| is_present(folder, &format!("{prefix}.experts.{e}.{}", p.name())))
        });
        let both = |first, second| Err(vec![Problem::Both { module: prefix.to_owned(), first, second }]);
        let missing = |tensor: String| vec![Problem::Missing { tensor, needed_by: needed_by.to_owned() }];
        match (is_stacked, is_switch, is_split) {
            (true, true, _) => both("stacked experts", "switch_mlp"),
            (true, _, true) => both("stacked experts", "one tensor per expert"),
            (_, true, true) => both("switch_mlp", "one tensor per expert"),
            (false, false, false) => Ok(None),
            (true, false, false) => {
                let (name, first, stacked_rows) = match projection {
                    Projection::Gate => (gate_up, 0, rows.saturating_mul(2)),
                    Projection::Up => (gate_up, rows, rows.saturating_mul(2)),
                    Projection::Down => (down, 0, rows),
                };
                self.mark(&name);
                let Some(tensor) = folder.tensors.get(&name) else { return Err(missing(name)) };
                let shape = [experts, stacked_rows, cols];
                dense::locate_stacked(tensor, shape, first, rows).map(Some).map_err(|p| vec![p])
            }
            (false, true, false) => {
                let module = switch(projection);
                self.mark_module(&module);
                let found = self.form(&module).map_err(|p| vec![p])?;
                let Some((_, weight)) = found else { return Err(missing(format!("{module}.weight"))) };
                let found = mlx::locate(folder, &module, weight, Some(experts), (rows, cols));
                found.map(Some).map_err(|p| vec![p])
            }
            (false, false, true) => {
                self.split_experts(prefix, projection, experts, (rows, cols), needed_by).map(Some)
            }
        }
    }

    fn split_experts(
        &mut self,
        prefix: &str,
        projection: Projection,
        experts: usize,
        (rows, cols): (usize, usize),
        needed_by: &str,
    ) -> Result<Vec<Module>, Vec<Problem>> {
        let (mut found, mut problems) = (Vec::new(), Vec::new());
        for expert in 0..experts {
            let module = format!("{prefix}.experts.{expert}.{}", projection.name());
            match self.module(&module, rows, cols) {
                Ok(Some(module)) => found.push(module),
                Ok(None) => problems.push(Problem::MissingExpert {
                    needed_by: needed_by.to_owned(),
                    expert,
                    experts,
                    projection: projection.name(),
                }),
                Err(problem) => problems.push(problem),
            }
        }
        if problems.is_empty() { Ok(found) } else { Err(problems) }
    }

    /// Floats of `shape`, in canonical axis order; `None` if they are not there.
    pub(crate) fn floats(&mut self, name: &str, shape: &[usize]) -> Result<Option<Floats>, Problem> {
        self.mark(name);
        let Some(tensor) = self.folder.tensors.get(name) else { return Ok(None) };
        let dtype = dense::float(tensor)?;
        let mut found =
            Floats { name: tensor.stored.to_string(), dtype, part: tensor.part(), channels_last: None };
        let stored = &tensor.shape[..];
        match *shape {
            // The same bytes either way.
            [channels, 1, taps] if name.ends_with("conv1d.weight") && stored == [channels, taps, 1] => {}
            [o, c, t, h, w] if tensor.is_channels_last() => {
                let axes = [o, t, h, w, c];
                tensor.expect_shape(&axes)?;
                found.channels_last = Some(axes);
            }
            _ => tensor.expect_shape(shape)?,
        }
        Ok(Some(found))
    }
}

enum Form {
    /// A float, or packed by MLX.
    Weight,
    AutoRound,
    CompressedTensors,
}

/// Is any part of the module there?
pub(crate) fn is_present(folder: &Folder, module: &str) -> bool {
    PARTS.iter().any(|part| folder.get(module, part).is_some())
}
