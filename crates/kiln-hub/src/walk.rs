//! A module's parameters in the order of its fields, each with its path.
//!
//! Burn walks a module with a visitor (to look) or a mapper (to replace) that is told when a field is entered
//! and left. The path of a parameter is the stack of those names. Looking asks for shapes through
//! `lazy_shape`, so parameters that were never used are not initialised just to be overwritten.

use burn_core::module::{Module, ModuleVisitor, Param};
use burn_tensor::backend::Backend;
use burn_tensor::{Bool, Int, Tensor};

use crate::convert::Kind;

/// The facts about a parameter that need not its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ParamInfo {
    pub path: String,
    pub shape: Vec<usize>,
    pub kind: Kind,
}

/// The stack of field names.
#[derive(Default)]
pub(crate) struct PathStack(Vec<String>);

impl PathStack {
    pub fn enter(&mut self, name: &str) {
        self.0.push(name.to_string());
    }

    pub fn exit(&mut self) {
        self.0.pop();
    }

    pub fn path(&self) -> String {
        self.0.join(".")
    }
}

/// All parameters and running states of a module.
pub(crate) fn list_params<B: Backend, M: Module<B>>(module: &M) -> Vec<ParamInfo> {
    let mut lister = Lister::default();
    module.visit(&mut lister);
    lister.params
}

#[derive(Default)]
struct Lister {
    path: PathStack,
    params: Vec<ParamInfo>,
}

impl Lister {
    fn add(&mut self, shape: Vec<usize>, kind: Kind) {
        self.params.push(ParamInfo {
            path: self.path.path(),
            shape,
            kind,
        });
    }
}

impl<B: Backend> ModuleVisitor<B> for Lister {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.add(param.lazy_shape().to_vec(), Kind::Float);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.add(param.lazy_shape().to_vec(), Kind::Int);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.add(param.lazy_shape().to_vec(), Kind::Bool);
    }
}
