//! The places of a training step: every tensor of the model and of the optimizer's state, by name.
//!
//! Places tell which tensor the program had at each place before and after a recorded call
//! (`kiln_burn::record::binding`), and they give inputs the names that people know:
//! `` `encoder.norm.running_mean` ``.
//!
//! Some places are *cells*: a module and its clones share one cell (a running statistic of batch norm), so
//! a clone of the model does not copy the tensors in cells. [`Cells`] finds them.

use std::sync::Arc;

use burn_autodiff::NodeId;
use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;
use burn_core::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn_ir::TensorId;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::record::AdaptorRecord;
use burn_optim::{Optimizer, SimpleOptimizer};
use burn_tensor::{Bool, Int, Tensor};
use hashbrown::HashMap;
use kiln_burn::record::{exchange, rehearse};
use kiln_burn::{Kiln, KilnDevice};

use super::TrainBackend;
use crate::input::{InputVisitor, KilnTensor, StepInput, TensorMap};
use crate::tracked::{self, TrackedTensor, Tracking};

/// A named tensor.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub name: Arc<str>,
    pub id: TensorId,
}

/// The tensors of `model`, in the order of its visit. Parameters that Burn draws when they are first used,
/// and that were not used yet, are left out: looking at them would draw them.
pub(super) fn of_model<B: TrainBackend, M: AutodiffModule<B>>(model: &M) -> Vec<Found> {
    let all = Names::of::<B, M>(model).tensors.into_iter();
    all.filter_map(|(name, id)| Some(Found { name, id: id? }))
        .collect()
}

/// The tensors that are in `cells` of `model`, in the order of its visit.
pub(super) fn in_cells<B: TrainBackend, M: AutodiffModule<B>>(model: &M, cells: &Cells) -> Vec<Found> {
    let all = Names::of::<B, M>(model).tensors.into_iter().enumerate();
    all.filter(|(position, _)| cells.contains(*position))
        .filter_map(|(_, (name, id))| Some(Found { name, id: id? }))
        .collect()
}

/// The ids of [`in_cells`], without their names.
pub(super) fn ids_in_cells<B: TrainBackend, M: AutodiffModule<B>>(model: &M, cells: &Cells) -> Vec<TensorId> {
    let mut ids = CellIds {
        cells,
        position: 0,
        ids: Vec::new(),
    };
    model.visit(&mut ids);
    ids.ids
}

struct CellIds<'a> {
    cells: &'a Cells,
    /// How many parameters were met.
    position: usize,
    ids: Vec<TensorId>,
}

impl CellIds<'_> {
    fn note(&mut self, tensor: impl FnOnce() -> Option<TensorId>) {
        if self.cells.contains(self.position) {
            self.ids.extend(tensor());
        }
        self.position += 1;
    }
}

/// The id of a parameter's tensor, if it has one.
macro_rules! id_in {
    ($param:ident) => {
        $param.is_initialized().then(|| id_of(&$param.val())).flatten()
    };
}

impl<B: TrainBackend> ModuleVisitor<B> for CellIds<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.note(|| id_in!(param));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.note(|| id_in!(param));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.note(|| id_in!(param));
    }
}

/// Whether all parameters of `model` have values.
pub(super) fn is_initialized<B: TrainBackend, M: AutodiffModule<B>>(model: &M) -> bool {
    Names::of::<B, M>(model)
        .tensors
        .iter()
        .all(|(_, id)| id.is_some())
}

/// `before`, the tensors that `model` had, together with those that were drawn since, in the order of the
/// model's visit; and the ids of those that were drawn.
pub(super) fn with_drawn<B: TrainBackend, M: AutodiffModule<B>>(
    model: &M,
    before: Vec<Found>,
) -> (Vec<Found>, Vec<TensorId>) {
    let known: HashMap<_, _> = before.into_iter().map(|found| (found.name, found.id)).collect();
    let mut all = of_model::<B, M>(model);
    let mut drawn = Vec::new();
    for found in &mut all {
        match known.get(&found.name) {
            Some(&id) => found.id = id,
            None => drawn.push(found.id),
        }
    }
    (all, drawn)
}

#[derive(Default)]
struct Names {
    path: Vec<String>,
    /// The names that were given, and how many parameters were met at the path of each.
    given: HashMap<Arc<str>, usize>,
    /// Each parameter's name and tensor, if it has one.
    tensors: Vec<(Arc<str>, Option<TensorId>)>,
    parameters: HashMap<ParamId, Arc<str>>,
}

impl Names {
    fn of<B: TrainBackend, M: AutodiffModule<B>>(model: &M) -> Self {
        let mut names = Self::default();
        model.visit(&mut names);
        names
    }

    fn note(&mut self, parameter: ParamId, tensor: Option<TensorId>) {
        let name = self.name();
        self.parameters.insert(parameter, name.clone());
        self.tensors.push((name, tensor));
    }

    /// A name that no other parameter has. A module that is written by hand need not say where its parts
    /// begin: of parameters at one path the second is named `` `path (2)` ``.
    fn name(&mut self) -> Arc<str> {
        let path = self.path.join(".");
        let mut name: Arc<str> = format!("`{path}`").into();
        if let Some(met) = self.given.get(&name).copied() {
            let numbered = |number| Arc::from(format!("`{path} ({number})`"));
            let mut number = met + 1;
            while self.given.contains_key::<Arc<str>>(&numbered(number)) {
                number += 1;
            }
            self.given.insert(name, number);
            name = numbered(number);
        }
        self.given.insert(name.clone(), 1);
        name
    }
}

/// The id of the one tensor of `input`.
fn id_of(input: &impl StepInput) -> Option<TensorId> {
    let mut visitor = InputVisitor::default();
    input.visit(&mut visitor);
    visitor.finish().0.first().map(|ir| ir.id)
}

impl<B: TrainBackend> ModuleVisitor<B> for Names {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.note(param.id, id_in!(param));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.note(param.id, id_in!(param));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.note(param.id, id_in!(param));
    }
}

/// The tensors of `optim`'s state, by parameter of `model`.
pub(super) fn of_optimizer<B, M, O>(model: &M, optim: &OptimizerAdaptor<O, M, B>) -> Vec<Found>
where
    B: TrainBackend,
    M: AutodiffModule<B>,
    O: SimpleOptimizer<Kiln>,
{
    let names = Names::of::<B, M>(model);
    let mut records: Vec<_> = optim.to_record().into_iter().collect();
    records.sort_by_key(|(parameter, _)| parameter.val());
    let mut found = Vec::new();
    for (parameter, record) in records {
        let name = names.parameters.get(&parameter).cloned().unwrap_or_else(|| {
            format!("parameter {} that the model does not have", parameter.serialize()).into()
        });
        let tensors = tensors_of::<B, O>(record);
        found.extend(tensors.into_iter().enumerate().map(|(index, tensor)| Found {
            name: format!("optimizer state {index} of {name}").into(),
            id: tensor.into_ir().id,
        }));
    }
    found
}

/// Evaluates an expression with the state in an [`AdaptorRecord`] and the rank of its parameter, a constant:
/// `with_state!(record, |state, D| O::to_device::<D>(state, device))`.
macro_rules! with_state {
    ($record:expr, |$state:ident, $rank:ident| $body:expr) => {{
        let burn_optim::record::AdaptorRecord::V1(record) = $record;
        use burn_optim::record::AdaptorRecordV1 as Ranked;
        with_state!(@match record, $state, $rank, $body, Rank0 0, Rank1 1, Rank2 2, Rank3 3, Rank4 4, Rank5 5, Rank6 6, Rank7 7, Rank8 8)
    }};
    (@match $record:ident, $state:ident, $rank:ident, $body:expr, $($variant:ident $number:literal),*) => {
        match $record {
            $(Ranked::$variant($state) => {
                const $rank: usize = $number;
                $body
            })*
        }
    };
}
pub(super) use with_state;

/// The tensors of one parameter's state, in order.
pub(super) fn tensors_of<B: TrainBackend, O: SimpleOptimizer<Kiln>>(
    record: AdaptorRecord<O, B>,
) -> Vec<KilnTensor> {
    with_state!(record, |state, D| exchange::collect(|device: &KilnDevice| {
        O::to_device::<D>(state, device)
    }))
}

/// The place of each parameter in the order of the visit of `model`.
pub(super) fn order<B: TrainBackend, M: AutodiffModule<B>>(model: &M) -> HashMap<ParamId, usize> {
    struct Order(HashMap<ParamId, usize>);
    impl<B: TrainBackend> ModuleVisitor<B> for Order {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let place = self.0.len();
            self.0.entry(param.id).or_insert(place);
        }
    }
    let mut order = Order(HashMap::new());
    model.visit(&mut order);
    order.0
}

/// Bytes of the tensors of `model`, whose parameters have values, and of those of `optim`'s state.
pub(super) fn bytes<B, M, O>(model: &M, optim: &OptimizerAdaptor<O, M, B>) -> (usize, usize)
where
    B: TrainBackend,
    M: AutodiffModule<B>,
    O: SimpleOptimizer<Kiln>,
{
    struct Bytes(usize);
    impl<B: TrainBackend> ModuleVisitor<B> for Bytes {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let value = param.val();
            self.0 += value.shape().num_elements() * value.dtype().size();
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
            let value = param.val();
            self.0 += value.shape().num_elements() * value.dtype().size();
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
            let value = param.val();
            self.0 += value.shape().num_elements() * value.dtype().size();
        }
    }
    let mut of_model = Bytes(0);
    model.visit(&mut of_model);
    let tensors = optim.to_record().into_values().flat_map(tensors_of::<B, O>);
    let of_optimizer = tensors
        .map(|tensor| tensor.shape().num_elements() * tensor.dtype().size())
        .sum();
    (of_model.0, of_optimizer)
}

/// Which parameters of a model are in cells that its clones share, by position in the order of its visit.
#[derive(Clone, Debug)]
pub(super) struct Cells(Vec<bool>);

impl Cells {
    /// The cells of `model`. They are found by giving a clone tensors without elements for a moment: where
    /// both share a cell, these show in the model itself.
    pub(super) fn of<B: TrainBackend, M: AutodiffModule<B> + Clone>(model: &M) -> Self {
        let before = Names::of::<B, M>(model).tensors;
        let mut swap = Swap::default();
        let probed = rehearse(|| {
            drop(model.clone().map(&mut swap));
            let now = Names::of::<B, M>(model).tensors;
            let mut back = Put {
                tensors: std::mem::take(&mut swap.taken).into_iter(),
            };
            drop(model.clone().map(&mut back));
            now
        });
        let now = probed.map(|(now, _)| now).unwrap_or_default();
        Self(
            before
                .iter()
                .zip(&now)
                .map(|((_, before), (_, now))| before != now)
                .collect(),
        )
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.0.iter().filter(|is_cell| **is_cell).count()
    }

    /// Whether there is any.
    pub(super) fn any(&self) -> bool {
        self.0.contains(&true)
    }

    /// Whether tensor `position` of a map is in a cell.
    pub(super) fn contains(&self, position: usize) -> bool {
        self.0.get(position).copied().unwrap_or(false)
    }
}

/// Takes every tensor and puts one without elements there.
#[derive(Default)]
struct Swap {
    taken: Vec<KilnTensor>,
    /// Which of those each placeholder stands for: several places of a model may share one cell.
    placeholders: HashMap<TensorId, usize>,
}

/// Puts these tensors there, in order.
struct Put {
    tensors: std::vec::IntoIter<KilnTensor>,
}

/// A mapper that replaces each tensor, of whichever kind, by the result of its method `tensor`. A parameter
/// that has no value yet stays without one; the mapper's method `skip` is called for it. A float parameter is
/// a leaf of its own in each place; the second form names the [`TensorMap`] that makes its tensors instead.
macro_rules! map_tensors {
    ($mapper:ty) => {
        $crate::train::places::map_tensors!($mapper, |this| &mut |tensor| this.tensor(tensor));
    };
    ($mapper:ty, |$this:ident| $map:expr) => {
        impl<B: $crate::train::TrainBackend> burn_core::module::ModuleMapper<B> for $mapper {
            fn map_float<const D: usize>(
                &mut self,
                param: burn_core::module::Param<burn_tensor::Tensor<B, D>>,
            ) -> burn_core::module::Param<burn_tensor::Tensor<B, D>> {
                if !param.is_initialized() {
                    self.skip();
                    return param;
                }
                let (id, tensor, mapper) = param.consume();
                let tracked = tensor.is_require_grad();
                let $this = self;
                let mut tensor = $crate::input::StepInput::map(tensor, $map);
                if tensor.is_require_grad() != tracked {
                    tensor = tensor.set_require_grad(tracked);
                }
                burn_core::module::Param::from_mapped_value(id, tensor, mapper)
            }

            fn map_int<const D: usize>(
                &mut self,
                param: burn_core::module::Param<burn_tensor::Tensor<B, D, burn_tensor::Int>>,
            ) -> burn_core::module::Param<burn_tensor::Tensor<B, D, burn_tensor::Int>> {
                if !param.is_initialized() {
                    self.skip();
                    return param;
                }
                let (id, tensor, mapper) = param.consume();
                burn_core::module::Param::from_mapped_value(
                    id,
                    $crate::input::StepInput::map(tensor, &mut |tensor| self.tensor(tensor)),
                    mapper,
                )
            }

            fn map_bool<const D: usize>(
                &mut self,
                param: burn_core::module::Param<burn_tensor::Tensor<B, D, burn_tensor::Bool>>,
            ) -> burn_core::module::Param<burn_tensor::Tensor<B, D, burn_tensor::Bool>> {
                if !param.is_initialized() {
                    self.skip();
                    return param;
                }
                let (id, tensor, mapper) = param.consume();
                burn_core::module::Param::from_mapped_value(
                    id,
                    $crate::input::StepInput::map(tensor, &mut |tensor| self.tensor(tensor)),
                    mapper,
                )
            }
        }
    };
}
pub(super) use map_tensors;

map_tensors!(Swap);
map_tensors!(Put);

impl Swap {
    fn skip(&mut self) {}

    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        let placeholder = tensor
            .client
            .zeros([0].into(), burn_backend::TensorMetadata::dtype(&tensor));
        let taken = match self.placeholders.get(&tensor.clone().into_ir().id) {
            Some(&earlier) => self.taken[earlier].clone(),
            None => tensor,
        };
        self.placeholders
            .insert(placeholder.clone().into_ir().id, self.taken.len());
        self.taken.push(taken);
        placeholder
    }
}

impl Put {
    fn skip(&mut self) {}

    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        self.tensors.next().unwrap_or(tensor)
    }
}

/// `model` with each tensor outside cells replaced by what `change` makes of its position and of it. A
/// parameter that is in two places stays one if `change` gives both the same tensor.
pub(super) fn map_outside<B: TrainBackend, M: AutodiffModule<B>>(
    model: M,
    cells: &Cells,
    mut change: impl FnMut(usize, KilnTensor) -> KilnTensor,
) -> M {
    model.map(&mut Outside {
        cells,
        position: 0,
        change: &mut change,
        leaves: HashMap::new(),
    })
}

/// Shows each tensor of `model` outside cells, with its position.
pub(super) fn look_outside<B: TrainBackend, M: AutodiffModule<B> + Clone>(
    model: &M,
    cells: &Cells,
    mut see: impl FnMut(usize, KilnTensor),
) {
    drop(map_outside::<B, M>(model.clone(), cells, |position, tensor| {
        see(position, tensor.clone());
        tensor
    }));
}

struct Outside<'a> {
    cells: &'a Cells,
    position: usize,
    change: &'a mut dyn FnMut(usize, KilnTensor) -> KilnTensor,
    /// What has become of each node, with or without a gradient, that was replaced by each tensor.
    leaves: HashMap<(NodeId, bool, TensorId), TrackedTensor>,
}

map_tensors!(Outside<'_>, |this| this);

impl TensorMap for Outside<'_> {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        Outside::tensor(self, tensor)
    }

    /// A leaf in two places of a model is one leaf afterwards, too, if it is one tensor: its gradient is the
    /// sum over both places.
    fn tracked(&mut self, tensor: TrackedTensor) -> TrackedTensor {
        let is_leaf = Tracking::float_is_require_grad(&tensor);
        let node = tensor.node.id;
        let changed = Outside::tensor(self, tracked::inner(tensor));
        let key = (node, is_leaf, changed.clone().into_ir().id);
        let leaf = self.leaves.entry(key).or_insert_with(|| match is_leaf {
            true => tracked::untracked(changed).require_grad(),
            false => tracked::untracked(changed),
        });
        leaf.clone()
    }
}

impl Outside<'_> {
    fn skip(&mut self) {
        self.position += 1;
    }

    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        let position = self.position;
        self.position += 1;
        match self.cells.contains(position) {
            true => tensor,
            false => (self.change)(position, tensor),
        }
    }
}
