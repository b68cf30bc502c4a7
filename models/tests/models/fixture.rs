//! Reads a fixture, puts its weights into a model through the key map, and compares tensors.

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Int, Tensor, TensorData};
use kiln_models::keys::{KeyMap, Pretrained};
use kiln_models::params::{TensorKind, assign_params};
use safetensors::{Dtype, SafeTensors};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;

/// Where the committed fixtures lie.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");

/// Inner backend of the tests.
pub type Inner = burn_flex::Flex;
/// Training backend of the tests.
pub type Ad = burn_autodiff::Autodiff<Inner>;

/// Largest difference allowed in f32, relative to the largest magnitude of the reference tensor.
const TOLERANCE: f64 = 1e-4;
/// The same in f64: the references are stored in f32, and RMS norms compute in f32.
const TOLERANCE_F64: f64 = 1e-5;

/// The tensors of a fixture, and the configuration in its metadata.
pub struct Fixture {
    pub name: String,
    pub family: String,
    pub config: String,
    tensors: BTreeMap<String, TensorData>,
    /// Whether the fixture belongs to the repository.
    committed: bool,
    /// What the test computes in at the moment.
    dtype: Cell<DType>,
}

impl Fixture {
    /// A committed fixture.
    pub fn load(name: &str) -> Self {
        Self::read(&Path::new(FOLDER).join(format!("{name}.safetensors")))
    }

    /// The committed fixtures of a family, and those in the folder that `KILN_MODEL_FIXTURES` names.
    pub fn family(family: &str) -> Vec<Self> {
        let folders = [FOLDER.to_string()]
            .into_iter()
            .chain(std::env::var("KILN_MODEL_FIXTURES"));
        let files = folders.flat_map(|folder| {
            let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder}: {error}"));
            entries.map(|entry| entry.expect("an entry of a folder").path())
        });
        let fixtures = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
        let fixtures: Vec<_> = fixtures
            .map(|path| Self::read(&path))
            .filter(|fixture| fixture.family == family)
            .collect();
        assert!(!fixtures.is_empty(), "no fixture of {family}");
        fixtures
    }

    fn read(path: &Path) -> Self {
        let name = path
            .file_stem()
            .expect("a file name")
            .to_string_lossy()
            .into_owned();
        let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a safetensors header");
        let metadata = header.metadata().as_ref().expect("metadata");
        let (family, config) = (metadata["family"].clone(), metadata["config"].clone());
        let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let tensors = file.iter().map(|(key, view)| {
            let shape = view.shape().to_vec();
            let data = match view.dtype() {
                Dtype::F32 => TensorData::new(chunks(view.data(), f32::from_le_bytes), shape),
                Dtype::I64 => TensorData::new(chunks(view.data(), i64::from_le_bytes), shape),
                other => panic!("{name}: {key} has dtype {other:?}"),
            };
            (key.to_string(), data)
        });
        let tensors = tensors.collect();
        let committed = path.starts_with(FOLDER);
        Self {
            name,
            family,
            config,
            tensors,
            committed,
            dtype: Cell::new(DType::F32),
        }
    }

    pub fn holds(&self, key: &str) -> bool {
        self.tensors.contains_key(key)
    }

    pub fn data(&self, key: &str) -> TensorData {
        self.tensors
            .get(key)
            .unwrap_or_else(|| panic!("{}: no tensor {key}", self.name))
            .clone()
    }

    pub fn float<B: Backend, const D: usize>(&self, key: &str) -> Tensor<B, D> {
        Tensor::<B, D>::from_data(self.data(key), &Default::default()).cast(self.dtype.get())
    }

    pub fn int<B: Backend, const D: usize>(&self, key: &str) -> Tensor<B, D, Int> {
        Tensor::from_data(self.data(key), &Default::default())
    }

    /// Loads all weights; the file and the model must hold exactly the same tensors.
    pub fn weights<B: Backend, M: Pretrained<B>>(&self, model: M) -> M {
        let map = model.key_map();
        let used: Vec<&str> = map.entries.iter().map(|entry| entry.key.as_str()).collect();
        for key in self.tensors.keys().filter_map(|key| key.strip_prefix("weight.")) {
            assert!(used.contains(&key), "{}: the model has no {key}", self.name);
        }
        assign_params(model, |path| Some(self.original(&map, "weight", path)))
            .unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// The tensor `group.key` of the original that belongs to `path`, in the layout of the module.
    fn original(&self, map: &KeyMap, group: &str, path: &str) -> TensorData {
        let entry = map
            .by_path(path)
            .unwrap_or_else(|| panic!("{}: no key for {path}", self.name));
        let data = self.data(&format!("{group}.{}", entry.key));
        assert_eq!(
            data.shape.to_vec(),
            entry.original_shape(),
            "{}: {}",
            self.name,
            entry.key
        );
        if entry.transpose { transposed(data) } else { data }
    }

    /// Compares training steps with the original's: logits, loss, every gradient, running statistics, and the
    /// logits of evaluation. `build` makes the model, `forward` and `evaluate` get logits, `loss` the loss.
    ///
    /// In f64 every fixture must agree, which leaves no room for a wrong formula. In f32 only the committed
    /// ones, because for any other inputs an activation may lie so near to a kink that rounding decides its
    /// side.
    pub fn check<M, const D: usize>(
        &self,
        build: impl Fn() -> M,
        forward: impl Fn(&M) -> Tensor<Ad, D>,
        evaluate: impl Fn(&M::InnerModule) -> Tensor<Inner, D>,
        loss: impl Fn(&M) -> Tensor<Ad, 1>,
    ) where
        M: Pretrained<Ad> + AutodiffModule<Ad>,
    {
        self.dtype.set(DType::F64);
        let model = self.weights(build()).map(&mut CastParams(DType::F64));
        self.check_step(model, &forward, &evaluate, &loss);
        self.dtype.set(DType::F32);
        if self.committed {
            self.check_step(self.weights(build()), &forward, &evaluate, &loss);
        }
    }

    fn check_step<M, const D: usize>(
        &self,
        model: M,
        forward: impl Fn(&M) -> Tensor<Ad, D>,
        evaluate: impl Fn(&M::InnerModule) -> Tensor<Inner, D>,
        loss: impl Fn(&M) -> Tensor<Ad, 1>,
    ) where
        M: Pretrained<Ad> + AutodiffModule<Ad>,
    {
        let map = model.key_map();
        self.compare(
            "eval logits",
            evaluate(&model.valid()).into_data(),
            self.data("output.eval_logits"),
        );
        let value = loss(&model);
        self.compare("loss", value.clone().into_data(), self.data("output.loss"));
        let grads = value.backward();
        let mut found = Gradients {
            names: Vec::new(),
            grads: &grads,
            found: BTreeMap::new(),
        };
        model.visit(&mut found);
        let found = found.found;
        for entry in &map.entries {
            if entry.kind == TensorKind::Parameter {
                let expected = self.original(&map, "grad", &entry.path);
                let actual = found.get(&entry.path).cloned();
                // An unused parameter has no gradient here and zeros there.
                let actual = actual.unwrap_or_else(|| TensorData::zeros::<f32, _>(expected.shape.to_vec()));
                self.compare_gradient(&entry.path, actual, expected);
            }
        }
        // Running statistics were updated once, by the pass of the loss.
        let after = Values::of(&model.valid());
        for entry in map
            .entries
            .iter()
            .filter(|entry| entry.kind == TensorKind::Buffer)
        {
            let expected = self.original(&map, "after", &entry.path);
            self.compare(&entry.path, after[&entry.path].clone(), expected);
        }
        self.compare("logits", forward(&model).into_data(), self.data("output.logits"));
    }

    /// Compares a tensor with the original's, relative to the largest magnitude in the original's.
    pub fn compare(&self, what: &str, actual: TensorData, expected: TensorData) {
        let tolerance = if self.dtype.get() == DType::F64 {
            TOLERANCE_F64
        } else {
            TOLERANCE
        };
        let allowed = tolerance * magnitude(&expected);
        self.within(what, actual, expected, allowed);
    }

    /// A gradient that is zero in exact arithmetic (of a key's bias under a softmax over keys, of a shift
    /// before a batch norm) is rounding noise here. The reference in f64 tells these apart from small
    /// gradients: they must be small beside the largest gradient of the model.
    fn compare_gradient(&self, path: &str, actual: TensorData, expected: TensorData) {
        let gradients = self.tensors.iter().filter(|(key, _)| key.starts_with("grad."));
        let largest = gradients.map(|(_, data)| magnitude(data)).fold(0.0, f64::max);
        let what = format!("gradient of {path}");
        match magnitude(&expected) < 1e-9 * largest {
            true => self.within(&what, actual, expected, 1e-6 * largest),
            false => self.compare(&what, actual, expected),
        }
    }

    fn within(&self, what: &str, actual: TensorData, expected: TensorData, allowed: f64) {
        assert_eq!(actual.shape, expected.shape, "{}: shape of {what}", self.name);
        let pairs = actual.iter::<f64>().zip(expected.iter::<f64>());
        let worst = pairs
            .map(|(actual, expected)| (actual - expected).abs())
            .fold(0.0, f64::max);
        assert!(
            worst <= allowed,
            "{}: {what} differs by {worst:.3e}, allowed is {allowed:.3e}",
            self.name
        );
        // `max` passes over NaN, so it is looked for on its own.
        assert!(
            actual.iter::<f64>().all(f64::is_finite),
            "{}: {what} is not finite",
            self.name
        );
    }
}

/// The largest absolute value.
fn magnitude(data: &TensorData) -> f64 {
    data.iter::<f64>()
        .fold(0.0, |largest, value| largest.max(value.abs()))
}

fn chunks<T, const N: usize>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes
        .chunks_exact(N)
        .map(|chunk| read(chunk.try_into().expect("a whole chunk")))
        .collect()
}

fn transposed(data: TensorData) -> TensorData {
    let [rows, cols] = [data.shape[0], data.shape[1]];
    let values: Vec<f32> = data.iter::<f32>().collect();
    let swapped: Vec<f32> = (0..rows * cols)
        .map(|at| values[(at % rows) * cols + at / rows])
        .collect();
    TensorData::new(swapped, [cols, rows])
}

/// Casts all tensors of a model.
struct CastParams(DType);

impl ModuleMapper<Ad> for CastParams {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<Ad, D>>) -> Param<Tensor<Ad, D>> {
        let (id, tensor, mapper) = param.consume();
        let require_grad = tensor.is_require_grad();
        let tensor = Tensor::from_inner(tensor.inner().cast(self.0)).set_require_grad(require_grad);
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Collects the gradient of each parameter by path.
struct Gradients<'a> {
    names: Vec<String>,
    grads: &'a <Ad as AutodiffBackend>::Gradients,
    found: BTreeMap<String, TensorData>,
}

impl ModuleVisitor<Ad> for Gradients<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.names.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.names.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Ad, D>>) {
        if let Some(grad) = param.val().grad(self.grads) {
            self.found.insert(self.names.join("."), grad.into_data());
        }
    }
}

/// Collects the value of each tensor by path.
#[derive(Default)]
pub struct Values {
    names: Vec<String>,
    found: BTreeMap<String, TensorData>,
}

impl Values {
    pub fn of<B: Backend, M: Module<B>>(module: &M) -> BTreeMap<String, TensorData> {
        let mut values = Self::default();
        module.visit(&mut values);
        values.found
    }
}

impl<B: Backend> ModuleVisitor<B> for Values {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.names.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.names.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.found.insert(self.names.join("."), param.val().into_data());
    }
}
