//! Writes synthetic weights as a checkpoint folder, as a stream: memory does not grow with the model.

use std::{
    fs::{self, File},
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
};

use serde_json::{Map, Value, json};

use super::{
    Synth,
    layout::{self, SIDECAR, Stored},
    values::CHUNK_BYTES,
};
use crate::{Error, config::CONFIG_FILE, index::INDEX_FILE};

/// Bytes of a shard; it may end one tensor later.
const SHARD_BYTES: u64 = 4 << 30;
/// Ending of files that are not finished.
const PARTIAL: &str = "partial";

/// Writes `synth` into `dir`, which must be absent or empty, and copies `companions` (tokenizer and chat
/// template) beside it. `progress` gets bytes done and bytes in all.
///
/// Files get their names only when all of them are written, `config.json` last; on an error they are removed.
pub fn write(
    dir: &Path,
    synth: &Synth,
    companions: &[PathBuf],
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), Error> {
    write_sharded(dir, synth, companions, SHARD_BYTES, progress)
}

fn write_sharded(
    dir: &Path,
    synth: &Synth,
    companions: &[PathBuf],
    shard_bytes: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), Error> {
    prepare(dir)?;
    let mut folder = Target { dir, names: Vec::new(), finished: false };
    let (sidecar, main): (Vec<Stored>, Vec<Stored>) =
        layout::tensors(synth).into_iter().partition(|t| t.sidecar);
    let total: u64 = main.iter().chain(&sidecar).map(Stored::bytes).sum();
    let shards = split(main, shard_bytes);
    let mut weight_map = Map::new();
    let mut done = 0;
    let mut step = |bytes: u64| {
        done += bytes;
        progress(done, total);
    };
    step(0);
    for companion in companions {
        let name = companion.file_name().ok_or_else(|| Error::NotAFile(companion.clone()))?;
        let mut from = crate::container::open_regular(companion)?;
        let (mut file, path) = folder.create(&name.to_string_lossy())?;
        std::io::copy(&mut from, &mut file).map_err(Error::io(path))?;
    }
    for (number, tensors) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
        for tensor in tensors {
            weight_map.insert(tensor.name.clone(), Value::String(name.clone()));
        }
        shard(&mut folder, &name, synth, tensors, &mut step)?;
    }
    if !sidecar.is_empty() {
        shard(&mut folder, SIDECAR, synth, &sidecar, &mut step)?;
    }
    let size: u64 = shards.iter().flatten().map(Stored::bytes).sum();
    let index = json!({"metadata": {"total_size": size}, "weight_map": weight_map});
    folder.text(INDEX_FILE, &index)?;
    folder.text(CONFIG_FILE, &layout::config(synth))?;
    folder.finish()
}

/// Creates the folder, or makes sure that it is empty.
fn prepare(dir: &Path) -> Result<(), Error> {
    match fs::read_dir(dir) {
        Ok(mut entries) => match entries.next() {
            Some(_) => Err(Error::NotEmpty(dir.to_owned())),
            None => Ok(()),
        },
        Err(e) if e.kind() == ErrorKind::NotFound => fs::create_dir_all(dir).map_err(Error::io(dir)),
        Err(e) => Err(Error::io(dir)(e)),
    }
}

fn split(tensors: Vec<Stored>, shard_bytes: u64) -> Vec<Vec<Stored>> {
    let mut shards: Vec<Vec<Stored>> = Vec::new();
    let mut room = 0;
    for tensor in tensors {
        if room == 0 {
            shards.push(Vec::new());
            room = shard_bytes;
        }
        room = room.saturating_sub(tensor.bytes());
        shards.last_mut().expect("pushed above").push(tensor);
    }
    shards
}

/// One safetensors file.
fn shard(
    folder: &mut Target,
    name: &str,
    synth: &Synth,
    tensors: &[Stored],
    step: &mut dyn FnMut(u64),
) -> Result<(), Error> {
    let (mut file, path) = folder.create(name)?;
    let mut header = Map::new();
    let kind = if synth.recipe().is_mlx() { "mlx" } else { "pt" };
    header.insert("__metadata__".into(), json!({"format": kind}));
    let mut end = 0;
    for tensor in tensors {
        let begin = end;
        end += tensor.bytes();
        let entry =
            json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [begin, end]});
        header.insert(tensor.name.clone(), entry);
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    if !synth.recipe().is_mlx() {
        // MLX alone does not pad: its tensors start at any byte, and readers must bear it.
        text.resize(text.len().next_multiple_of(8), b' ');
    }
    let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(Error::io(&path));
    put(&(text.len() as u64).to_le_bytes())?;
    put(&text)?;
    let mut buffer = vec![0; CHUNK_BYTES];
    for piece in tensors.iter().flat_map(|t| &t.pieces) {
        for start in (0..piece.bytes()).step_by(CHUNK_BYTES) {
            let chunk = &mut buffer[..CHUNK_BYTES.min(piece.bytes() - start)];
            piece.fill(synth.seed, start, chunk);
            put(chunk)?;
            step(chunk.len() as u64);
        }
    }
    file.sync_all().map_err(Error::io(path))
}

/// Files under temporary names, removed again unless all of them are finished.
struct Target<'a> {
    dir: &'a Path,
    names: Vec<String>,
    finished: bool,
}

impl Target<'_> {
    fn partial(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.{PARTIAL}"))
    }

    fn create(&mut self, name: &str) -> Result<(File, PathBuf), Error> {
        let path = self.partial(name);
        let file = File::create_new(&path).map_err(Error::io(&path))?;
        self.names.push(name.to_owned());
        Ok((file, path))
    }

    fn text(&mut self, name: &str, value: &Value) -> Result<(), Error> {
        let (mut file, path) = self.create(name)?;
        file.write_all(format!("{value:#}\n").as_bytes()).map_err(Error::io(path))
    }

    fn finish(mut self) -> Result<(), Error> {
        for name in &self.names {
            let path = self.dir.join(name);
            fs::rename(self.partial(name), &path).map_err(Error::io(path))?;
        }
        self.finished = true;
        Ok(())
    }
}

impl Drop for Target<'_> {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        for name in &self.names {
            // Already on the way out with an error that says more than a failed removal could.
            let _ = fs::remove_file(self.partial(name));
            let _ = fs::remove_file(self.dir.join(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Checkpoint, Expected, Kind, Recipe, Source};

    fn synth(recipe: Recipe) -> Synth {
        let config = json!({"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}});
        let name = |i: usize| format!("model.language_model.layers.{i}.self_attn.o_proj");
        let one = |i| Expected::new(name(i), Kind::Matrix { rows: 64, cols: 128 }, "a layer");
        Synth::new(config, (0..5).map(one).collect(), recipe, 1)
    }

    #[test]
    fn shards_split_and_join() {
        for recipe in Recipe::ALL {
            let dir = tempfile::tempdir().expect("a folder");
            let synth = synth(recipe);
            write_sharded(dir.path(), &synth, &[], 10_000, &mut |_, _| {}).expect("written");
            let checkpoint = Checkpoint::open(dir.path()).expect("opens");
            assert!(checkpoint.report().files.len() > 1, "{recipe}");
            for one in synth.expected() {
                let both = [checkpoint.matrix(&one.name, 64, 128), synth.matrix(&one.name, 64, 128)];
                let [read, made] = both.map(|m| m.expect("there"));
                assert_eq!(
                    (read.codes(), read.scales(), read.biases()),
                    (made.codes(), made.scales(), made.biases())
                );
            }
        }
    }

    #[test]
    fn errors_leave_nothing() {
        let dir = tempfile::tempdir().expect("a folder");
        let companions = [dir.path().join("absent/tokenizer.json")];
        let target = dir.path().join("target");
        write(&target, &synth(Recipe::Bf16), &companions, &mut |_, _| {}).expect_err("no such companion");
        assert_eq!(fs::read_dir(&target).expect("there").count(), 0);
        let twice = vec![dir.path().join("x"), dir.path().join("x")];
        fs::write(dir.path().join("x"), "x").expect("written");
        write(&target, &synth(Recipe::Bf16), &twice, &mut |_, _| {}).expect_err("the same name twice");
        assert_eq!(fs::read_dir(&target).expect("there").count(), 0);
        let error = write(dir.path(), &synth(Recipe::Bf16), &[], &mut |_, _| {}).expect_err("not empty");
        assert!(error.to_string().contains("is not empty"), "{error}");
    }
}
