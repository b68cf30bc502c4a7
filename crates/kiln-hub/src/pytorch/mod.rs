//! PyTorch archives: `pytorch_model.bin`, `.pt`, `.pth`.
//!
//! There are two forms. Since PyTorch 1.6 an archive is a zip file with the pickled dictionary in `data.pkl`
//! and the bytes of each storage, uncompressed, in `data/<key>`. Before that it was five pickles in a row
//! (magic number, protocol, system, dictionary, list of storage keys) followed by the storages. In both a
//! tensor is a view of a storage: offset, sizes and strides. Views that are contiguous are read from the
//! mapped file when asked for; others (transposed weights, say) are gathered when the file is opened.
//!
//! Every offset, stride and length is checked against the storage: a truncated file, or a view that leaves
//! its storage, is an error and never a tensor of zeros. (burn-store's reader fills what is missing with
//! zeros and passes over strides, which turns damaged and transposed weights into wrong ones without a word;
//! hence this one.)
//!
//! A pickle may call any function of Python, and an archive may carry programs. Nothing of either is run: the
//! tensors are read, and the names of the rest are kept for a warning ([`Archive::code`]).

mod pickle;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Cursor;
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::Dtype;

use crate::convert::itemsize;
use crate::error::HubError;
use crate::mapped::{Entry, MappedFile};
use crate::mistaken;
use pickle::{Arena, Id, Node};

/// A tensor that is not one range of its file.
#[derive(Clone, Debug)]
pub(crate) struct OwnedTensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// The tensors of an archive.
#[derive(Debug)]
pub(crate) struct Archive {
    pub file: MappedFile,
    pub mapped: Vec<(String, Entry)>,
    pub owned: Vec<(String, OwnedTensor)>,
    /// Functions that the pickle would call in Python, beyond those that make tensors, and programs in the
    /// archive.
    pub code: Vec<String>,
}

/// Modules whose classes and functions make the plain contents of a checkpoint.
const ORDINARY: [&str; 6] = ["torch", "collections", "numpy", "_codecs", "argparse", "pathlib"];

/// Keys under which training scripts put the weights, beside others at the file's top level. Of these
/// dictionaries and the top level, the one with the most tensors has the weights; of equals, the first one.
const NESTED: [&str; 4] = ["state_dict", "model_state_dict", "model", "module"];

/// Tensors that are gathered may have this many times the bytes of their file: a shared storage that is
/// transposed counts for each name.
const GATHERED_A_FILE: usize = 4;

/// PyTorch's limit.
const MOST_DIMENSIONS: usize = 64;

/// Most bytes of a tensor's name, and of a storage's.
const LONGEST_KEY: usize = 4096;

/// The beginning of the old form: protocol 2, and the magic number as an integer of ten bytes.
const LEGACY_MAGIC: &[u8] = &[
    0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, b'.',
];

/// Opens an archive.
pub(crate) fn open(path: &Path) -> Result<Archive, HubError> {
    let file = MappedFile::open(path)?;
    let fail = |reason: String| HubError::Pytorch {
        path: path.to_path_buf(),
        reason,
    };
    let bytes = file.bytes();
    let content = if bytes.starts_with(LEGACY_MAGIC) {
        legacy(bytes)
    } else if bytes.starts_with(b"PK") {
        zipped(bytes)
    } else {
        Err("it is neither a zip archive nor PyTorch's older form".to_string())
    };
    let (views, code) = match content {
        Ok(content) => content,
        Err(reason) => {
            mistaken::refuse(path, bytes)?;
            return Err(fail(reason));
        }
    };
    let (mut mapped, mut owned) = (vec![], vec![]);
    let mut room = bytes.len().saturating_mul(GATHERED_A_FILE);
    for (name, view) in views {
        let placed = view
            .place(bytes, &mut room)
            .map_err(|reason| fail(format!("tensor `{name}`: {reason}")))?;
        match placed {
            Placed::Range(range) => mapped.push((
                name,
                Entry {
                    dtype: view.dtype,
                    shape: view.sizes,
                    range,
                },
            )),
            Placed::Gathered(bytes) => owned.push((
                name,
                OwnedTensor {
                    dtype: view.dtype,
                    shape: view.sizes,
                    bytes,
                },
            )),
        }
    }
    Ok(Archive {
        file,
        mapped,
        owned,
        code,
    })
}

/// A tensor as a view of a storage.
#[derive(Debug)]
struct View {
    dtype: Dtype,
    /// The storage's bytes in the file.
    storage: Range<usize>,
    /// First element.
    offset: usize,
    sizes: Vec<usize>,
    /// In elements.
    strides: Vec<usize>,
}

enum Placed {
    Range(Range<usize>),
    Gathered(Vec<u8>),
}

impl View {
    /// Finds the view's bytes, after checking that all of them are in the storage. What is gathered is taken
    /// from `room`.
    fn place(&self, file: &[u8], room: &mut usize) -> Result<Placed, String> {
        let width = itemsize(self.dtype).ok_or("an element type without whole bytes")?;
        let count = self
            .sizes
            .iter()
            .try_fold(1usize, |n, &size| n.checked_mul(size))
            .ok_or("its shape overflows")?;
        let available = self.storage.len() / width;
        if count == 0 {
            return Ok(Placed::Gathered(vec![]));
        }
        let last = self
            .sizes
            .iter()
            .zip(&self.strides)
            .try_fold(self.offset, |at, (&size, &stride)| {
                at.checked_add((size - 1).checked_mul(stride)?)
            });
        if last.is_none_or(|last| last >= available) {
            return Err(format!(
                "sizes {:?} with strides {:?} from {} leave its storage of {available} elements",
                self.sizes, self.strides, self.offset
            ));
        }
        // A few bytes with strides of 0 could otherwise ask for any amount of memory.
        if count > available {
            return Err(format!(
                "{count} elements are made of a storage of {available}; save a contiguous copy"
            ));
        }
        let start = self.storage.start + self.offset * width;
        if self.is_contiguous() {
            return Ok(Placed::Range(start..start + count * width));
        }
        *room = room.checked_sub(count * width).ok_or_else(|| {
            format!("views that are not contiguous make more than {GATHERED_A_FILE} times the bytes of the file; save contiguous copies")
        })?;
        let mut bytes = Vec::with_capacity(count * width);
        let mut index = vec![0usize; self.sizes.len()];
        for _ in 0..count {
            let at: usize = index
                .iter()
                .zip(&self.strides)
                .map(|(i, stride)| i * stride)
                .sum();
            bytes.extend_from_slice(&file[start + at * width..start + (at + 1) * width]);
            for dimension in (0..index.len()).rev() {
                index[dimension] += 1;
                if index[dimension] < self.sizes[dimension] {
                    break;
                }
                index[dimension] = 0;
            }
        }
        Ok(Placed::Gathered(bytes))
    }

    /// Whether the elements lie one after the other, last dimension fastest.
    fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.sizes
            .iter()
            .zip(&self.strides)
            .rev()
            .all(|(&size, &stride)| {
                let fits = size == 1 || stride == expected;
                expected *= size;
                fits
            })
    }
}

type Views = BTreeMap<String, View>;

/// The tensors, and descriptions of the code in an archive.
type Content = (Views, Vec<String>);

/// Functions of other modules than [`ORDINARY`] that a pickle calls, each once.
fn foreign_calls(arena: &Arena) -> BTreeSet<String> {
    let ordinary = |module: &str| ORDINARY.contains(&module.split('.').next().unwrap_or(module));
    arena
        .called()
        .filter(|(module, _)| !ordinary(module))
        .map(|(module, name)| format!("a call of {module}.{name}"))
        .collect()
}

/// The form since PyTorch 1.6.
fn zipped(bytes: &[u8]) -> Result<Content, String> {
    let mut archive = zip::ZipArchive::new(Cursor::new(bytes)).map_err(|error| error.to_string())?;
    let mut entries = HashMap::new();
    for number in 0..archive.len() {
        let entry = archive.by_index_raw(number).map_err(|error| error.to_string())?;
        if entry.compression() != zip::CompressionMethod::Stored {
            return Err(format!(
                "entry {} is compressed, which PyTorch does not do",
                entry.name()
            ));
        }
        let range = entry.data_start().and_then(|start| {
            let start = usize::try_from(start).ok()?;
            let end = start.checked_add(usize::try_from(entry.size()).ok()?)?;
            (end <= bytes.len()).then_some(start..end)
        });
        let range = range.ok_or_else(|| format!("entry {} lies outside the file", entry.name()))?;
        // The first component is a name that the writer chose.
        let name = entry
            .name()
            .split_once('/')
            .map_or(entry.name(), |(_, rest)| rest)
            .to_string();
        entries.insert(name, range);
    }
    if let Some(order) = entries.get("byteorder")
        && bytes[order.clone()].trim_ascii() != b"little"
    {
        return Err("it was written on a big-endian machine".to_string());
    }
    let dictionary = entries.get("data.pkl").ok_or("it has no data.pkl")?;
    let (arena, root, _) = pickle::read(&bytes[dictionary.clone()]).map_err(|error| error.to_string())?;
    let mut code = foreign_calls(&arena);
    code.extend(
        entries
            .keys()
            .filter(|name| name.ends_with(".py"))
            .map(|name| format!("the program {name}")),
    );
    let views = views(&arena, root, |storage| {
        let range = entries.get(&format!("data/{}", storage.key));
        let range = range
            .ok_or_else(|| format!("storage {} is missing", storage.key))?
            .clone();
        if range.len() != storage.bytes {
            return Err(format!(
                "storage {} should be {} bytes and is {}",
                storage.key,
                storage.bytes,
                range.len()
            ));
        }
        Ok(range)
    })?;
    Ok((views, code.into_iter().collect()))
}

/// The form before PyTorch 1.6.
fn legacy(bytes: &[u8]) -> Result<Content, String> {
    let mut at = 0;
    let mut next = || {
        let (arena, root, length) = pickle::read(&bytes[at..]).map_err(|error| error.to_string())?;
        at += length;
        Ok::<_, String>((arena, root))
    };
    let _magic = next()?;
    let _protocol = next()?;
    let (system, system_root) = next()?;
    if entry(&system, system_root, "little_endian").is_some_and(|id| *system.get(id) == Node::Bool(false)) {
        return Err("it was written on a big-endian machine".to_string());
    }
    let (arena, root) = next()?;
    let (keys, keys_root) = next()?;

    // A tensor that cannot be read is a better reason than its storage.
    views(&arena, root, |_| Ok(0..0))?;
    // The storages follow in the order of the list of keys, those of an optimizer's tensors among them, but
    // only the references to them tell their element types.
    let references = arena.references().filter_map(|id| storage(&arena, id).ok());
    let sizes: HashMap<String, usize> = references
        .map(|storage| (storage.key, storage.itemsize))
        .collect();
    let mut ranges = HashMap::new();
    for &key in keys
        .items(keys_root)
        .ok_or("its list of storages is not a list")?
    {
        let key = keys.text(key).ok_or("a storage's key is not text")?;
        let size = *sizes
            .get(key)
            .ok_or_else(|| format!("storage {key} belongs to no tensor of a known element type"))?;
        let count = bytes
            .get(at..at + 8)
            .and_then(|b| b.try_into().ok())
            .map(u64::from_le_bytes);
        let length = count
            .and_then(|count| usize::try_from(count).ok())
            .and_then(|count| count.checked_mul(size));
        let end = length
            .and_then(|length| (at + 8).checked_add(length))
            .filter(|&end| end <= bytes.len());
        let end = end.ok_or_else(|| format!("it ends in the middle of storage {key}"))?;
        ranges.insert(key.to_string(), at + 8..end);
        at = end;
    }
    if at != bytes.len() {
        return Err(format!("{} bytes follow the last storage", bytes.len() - at));
    }
    let views = views(&arena, root, |storage| {
        ranges
            .get(&storage.key)
            .cloned()
            .ok_or_else(|| format!("storage {} is missing", storage.key))
    })?;
    Ok((views, foreign_calls(&arena).into_iter().collect()))
}

/// A storage as a tensor refers to it.
struct Storage {
    key: String,
    /// Bytes an element, of the type that the storage was saved as.
    itemsize: usize,
    /// Length that the reference announces.
    bytes: usize,
    /// `None` for storages without a type, whose tensors tell it.
    dtype: Option<Dtype>,
}

/// All tensors of the state dictionary in a pickle.
fn views(
    arena: &Arena,
    root: Id,
    mut range: impl FnMut(&Storage) -> Result<Range<usize>, String>,
) -> Result<Views, String> {
    let candidates = std::iter::once(Some(root)).chain(NESTED.iter().map(|key| entry(arena, root, key)));
    let mut weights: (usize, &[(Id, Id)]) = (0, &[]);
    for candidate in candidates.flatten() {
        let Node::Dict(entries) = arena.get(candidate) else {
            continue;
        };
        let named = |&&(key, value): &&(Id, Id)| arena.text(key).is_some() && tensor(arena, value).is_some();
        let count = entries.iter().filter(named).count();
        if count > weights.0 {
            weights = (count, entries);
        }
    }
    let mut found = Views::new();
    for &(key, value) in weights.1 {
        let Some(name) = arena.text(key) else { continue };
        if name.len() > LONGEST_KEY {
            return Err(format!("a key of {} bytes, more than {LONGEST_KEY}", name.len()));
        }
        if let Some(tensor) = tensor(arena, value) {
            let (storage, mut view) = tensor.map_err(|reason| format!("tensor `{name}`: {reason}"))?;
            view.storage = range(&storage)?;
            found.insert(name.to_string(), view);
        }
    }
    if !found.is_empty() {
        return Ok(found);
    }
    Err(format!(
        "it has no tensors at its top level or under {}; save model.state_dict(), not the model",
        NESTED.join(", ")
    ))
}

/// The value of a key in a dictionary; the last one, as in Python.
fn entry(arena: &Arena, dictionary: Id, key: &str) -> Option<Id> {
    match arena.get(dictionary) {
        Node::Dict(entries) => entries
            .iter()
            .rev()
            .find(|(k, _)| arena.text(*k) == Some(key))
            .map(|(_, value)| *value),
        _ => None,
    }
}

/// A tensor, if the value is one: a call of one of PyTorch's functions that rebuild tensors.
fn tensor(arena: &Arena, mut id: Id) -> Option<Result<(Storage, View), String>> {
    // A parameter wraps a tensor; nothing wraps a parameter.
    for _ in 0..2 {
        let Node::Call(function, arguments) = arena.get(id) else {
            return None;
        };
        let Node::Global(module, name) = arena.get(*function) else {
            return None;
        };
        let arguments = arena.items(*arguments)?;
        match (&**module, &**name) {
            ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => {
                id = *arguments.first()?
            }
            ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2") => {
                return Some(rebuild(arena, arguments, None));
            }
            ("torch._utils", "_rebuild_tensor_v3") => {
                return Some(match arguments.get(6).map(|&id| arena.get(id)) {
                    Some(Node::Global(_, dtype)) => rebuild(arena, arguments, Some(dtype)),
                    _ => Err("it names no element type".to_string()),
                });
            }
            ("torch._utils", other) if other.starts_with("_rebuild") => {
                return Some(Err(format!(
                    "{other}: sparse, quantized and other special tensors are not supported"
                )));
            }
            _ => return None,
        }
    }
    None
}

/// The arguments `(storage, offset, sizes, strides, …)`.
fn rebuild(arena: &Arena, arguments: &[Id], dtype: Option<&str>) -> Result<(Storage, View), String> {
    let &[storage, offset, sizes, strides, ..] = arguments else {
        return Err("it has too few arguments".into());
    };
    let storage = self::storage(arena, storage)?;
    let dtype = match dtype {
        Some(name) => Some(dtype_named(name).ok_or_else(|| format!("its elements are {name}"))?),
        None => storage.dtype,
    };
    let dtype = dtype.ok_or("its storage has no element type")?;
    let offset = arena
        .int(offset)
        .and_then(|n| usize::try_from(n).ok())
        .ok_or("its offset is no number")?;
    // One list of sizes may belong to any number of tensors.
    for list in [sizes, strides] {
        let count = arena.items(list).map_or(0, <[Id]>::len);
        if count > MOST_DIMENSIONS {
            return Err(format!("it has {count} dimensions, more than {MOST_DIMENSIONS}"));
        }
    }
    let sizes = arena.sizes(sizes).ok_or("its sizes are no numbers")?;
    let strides = arena.sizes(strides).ok_or("its strides are no numbers")?;
    if sizes.len() != strides.len() {
        return Err("it has another number of strides than of sizes".to_string());
    }
    Ok((
        storage,
        View {
            dtype,
            storage: 0..0,
            offset,
            sizes,
            strides,
        },
    ))
}

/// The reference `("storage", type, key, device, elements)`; the older form has a sixth item, for views of
/// storages.
fn storage(arena: &Arena, id: Id) -> Result<Storage, String> {
    let items = match arena.get(id) {
        Node::Persistent(reference) => arena.items(*reference),
        _ => None,
    };
    let Some(&[kind, class, key, _device, elements, ref rest @ ..]) = items else {
        return Err("it refers to no storage".to_string());
    };
    if arena.text(kind) != Some("storage") || rest.iter().any(|&id| *arena.get(id) != Node::None) {
        return Err("it refers to its storage in an unknown way".to_string());
    }
    let Node::Global(_, class) = arena.get(class) else {
        return Err("its storage has no class".to_string());
    };
    let dtype = match class.strip_suffix("Storage") {
        Some("Untyped") => None,
        Some(prefix) => Some(dtype_named(prefix).ok_or_else(|| format!("its storage is a {class}"))?),
        None => return Err(format!("its storage is a {class}")),
    };
    let itemsize = dtype
        .map_or(Some(1), itemsize)
        .ok_or("its elements are not whole bytes")?;
    let key = arena
        .text(key)
        .filter(|key| key.len() <= LONGEST_KEY)
        .ok_or("its storage's key is not a short text")?
        .to_string();
    let elements = arena.int(elements).and_then(|n| usize::try_from(n).ok());
    let bytes = elements
        .and_then(|n| n.checked_mul(itemsize))
        .ok_or("its storage's length is no number")?;
    Ok(Storage {
        key,
        itemsize,
        bytes,
        dtype,
    })
}

/// PyTorch's names of element types: of `torch.dtype` and, in capitals, of the classes of storages.
fn dtype_named(name: &str) -> Option<Dtype> {
    Some(match name {
        "float64" | "Double" => Dtype::F64,
        "float32" | "Float" => Dtype::F32,
        "float16" | "Half" => Dtype::F16,
        "bfloat16" | "BFloat16" => Dtype::BF16,
        "int64" | "Long" => Dtype::I64,
        "int32" | "Int" => Dtype::I32,
        "int16" | "Short" => Dtype::I16,
        "int8" | "Char" => Dtype::I8,
        "uint8" | "Byte" => Dtype::U8,
        "uint16" => Dtype::U16,
        "uint32" => Dtype::U32,
        "uint64" => Dtype::U64,
        "bool" | "Bool" => Dtype::BOOL,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two names of a transposed view fit, a hundred thousand of a small file do not.
    #[test]
    fn gathered_views_are_bounded() {
        let file = [0; 24];
        let view = View {
            dtype: Dtype::F32,
            storage: 0..24,
            offset: 0,
            sizes: vec![3, 2],
            strides: vec![1, 3],
        };
        let mut room = 60;
        for _ in 0..2 {
            let placed = view.place(&file, &mut room).unwrap();
            assert!(matches!(placed, Placed::Gathered(bytes) if bytes.len() == 24));
        }
        let error = view.place(&file, &mut room).err().unwrap();
        assert!(error.contains("contiguous copies"), "{error}");
    }
}
