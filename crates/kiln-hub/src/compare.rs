//! The comparison of a checkpoint with a module, before anything is loaded.
//!
//! The comparison walks the module without initialising anything, looks up each parameter's rule and
//! tensor, and collects every disagreement into one [`KeyReport`], so that all errors of a mapping are seen
//! at once. Its result is a [`Plan`]: which tensor fills which parameter.

use std::collections::{BTreeMap, BTreeSet};

use crate::checkpoint::{Checkpoint, StoredTensor};
use crate::convert::kind_of;
use crate::error::{AmbiguousKeys, HubError, KeyReport, MisshapenKey, MissingKey, MistypedKey};
use crate::key_map::{KeyMap, KeyRule, Transform};
use crate::load::{LoadOptions, Loaded};
use crate::walk::ParamInfo;

/// Which key fills a parameter, and how.
pub(crate) type Plan = BTreeMap<String, (String, Transform)>;

/// Looks at module and checkpoint together; an error lists everything that does not fit.
pub(crate) fn compare(
    params: &[ParamInfo],
    checkpoint: &Checkpoint,
    map: &KeyMap,
    options: &LoadOptions,
) -> Result<(Plan, Loaded), HubError> {
    let rules = map.by_param()?;
    let mut comparison = Comparison {
        checkpoint,
        options,
        report: KeyReport {
            place: checkpoint.place().to_string(),
            ..Default::default()
        },
        plan: Plan::new(),
        loaded: Loaded::default(),
        used: BTreeSet::new(),
    };
    for param in params {
        match rules.get(param.path.as_str()) {
            Some(rule) => comparison.mapped(param, rule)?,
            None => comparison.unmapped(param),
        }
    }
    comparison.finish(map)
}

struct Comparison<'a> {
    checkpoint: &'a Checkpoint,
    options: &'a LoadOptions,
    report: KeyReport,
    plan: Plan,
    loaded: Loaded,
    used: BTreeSet<&'a str>,
}

impl<'a> Comparison<'a> {
    fn unmapped(&mut self, param: &ParamInfo) {
        if below(&self.options.skip, &param.path) {
            self.loaded.kept.push(param.path.clone());
        } else {
            self.report.unmapped.push(param.path.clone());
        }
    }

    fn mapped(&mut self, param: &ParamInfo, rule: &'a KeyRule) -> Result<(), HubError> {
        let names = || {
            std::iter::once(&rule.key)
                .chain(&rule.aliases)
                .map(String::as_str)
        };
        if below(&self.options.skip, &param.path) {
            self.used.extend(names());
            self.loaded.kept.push(param.path.clone());
            return Ok(());
        }
        let expected = stored_shape(param, rule)?;
        let checkpoint = self.checkpoint;
        let mut found = names().filter_map(|name| Some((name, checkpoint.stored(name)?)));
        let Some((key, stored)) = found.next() else {
            if rule.head && self.options.new_heads {
                self.start_anew(param);
            } else if below(&self.options.allow_missing, &param.path) {
                self.loaded.kept.push(param.path.clone());
            } else {
                self.report.missing.push(MissingKey {
                    param: param.path.clone(),
                    key: rule.key.clone(),
                    shape: expected,
                    head: rule.head,
                });
            }
            return Ok(());
        };
        self.used.insert(key);
        for (other, _) in found {
            if !checkpoint.same(key, other)? {
                self.report.ambiguous.push(AmbiguousKeys {
                    param: param.path.clone(),
                    key: key.to_string(),
                    other: other.to_string(),
                });
            }
        }
        self.take(param, rule, key, stored, expected);
        Ok(())
    }

    /// Plans to fill a parameter from the tensor `key`, if that is of its shape and kind.
    fn take(
        &mut self,
        param: &ParamInfo,
        rule: &KeyRule,
        key: &str,
        stored: StoredTensor,
        expected: Vec<usize>,
    ) {
        if stored.shape != expected {
            if rule.head && self.options.new_heads {
                self.start_anew(param);
                return;
            }
            self.report.misshapen.push(MisshapenKey {
                param: param.path.clone(),
                key: key.to_string(),
                expected,
                found: stored.shape,
                head: rule.head,
            });
        } else if kind_of(stored.dtype) != Some(param.kind) {
            self.report.mistyped.push(MistypedKey {
                param: param.path.clone(),
                key: key.to_string(),
                expected: param.kind.name(),
                found: format!("{:?}", stored.dtype),
            });
        } else {
            self.plan
                .insert(param.path.clone(), (key.to_string(), rule.transform));
        }
    }

    fn start_anew(&mut self, param: &ParamInfo) {
        self.loaded.kept.push(param.path.clone());
        self.loaded.new_heads.push(param.path.clone());
    }

    fn finish(mut self, map: &KeyMap) -> Result<(Plan, Loaded), HubError> {
        // A file may hold one tensor under several of its names; the spare ones are not a mistake.
        let aliases: BTreeSet<&str> = map
            .rules
            .iter()
            .flat_map(|r| &r.aliases)
            .map(String::as_str)
            .collect();
        let unused = self.checkpoint.names().filter(|key| !self.used.contains(key));
        self.loaded.unused = unused.map(str::to_string).collect();
        if !self.options.allow_unexpected {
            let expected = |key: &str| aliases.contains(key) || map.ignorable.iter().any(|p| p.matches(key));
            self.report.unexpected = self
                .loaded
                .unused
                .iter()
                .filter(|key| !expected(key))
                .cloned()
                .collect();
        }
        if self.report.is_clean() {
            Ok((self.plan, self.loaded))
        } else {
            Err(HubError::Keys(Box::new(self.report)))
        }
    }
}

/// The shape that a parameter's tensor has in the checkpoint.
fn stored_shape(param: &ParamInfo, rule: &KeyRule) -> Result<Vec<usize>, HubError> {
    let mut shape = param.shape.clone();
    if rule.transform == Transform::Transpose {
        if shape.len() != 2 {
            return Err(HubError::KeyMap(format!(
                "parameter `{}` has rank {} and cannot be transposed",
                param.path,
                shape.len()
            )));
        }
        shape.reverse();
    }
    Ok(shape)
}

/// Whether a path equals one of the prefixes or lies below it.
fn below(prefixes: &[String], path: &str) -> bool {
    prefixes.iter().any(|prefix| {
        let prefix = prefix.trim_end_matches('.');
        path.strip_prefix(prefix)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    })
}

#[cfg(test)]
mod tests {
    use super::below;

    #[test]
    fn a_prefix_ends_at_a_dot() {
        let prefixes = vec!["head".to_string(), "layers.1.".to_string()];
        assert!(below(&prefixes, "head"));
        assert!(below(&prefixes, "head.weight"));
        assert!(below(&prefixes, "layers.1.bias"));
        assert!(!below(&prefixes, "header.weight"));
        assert!(!below(&prefixes, "layers.10.bias"));
    }
}
