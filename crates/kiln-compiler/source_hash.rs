//! For build scripts: a hash of sources. It is part of the key of the disk cache: a step written by another
//! version of a crate, even one with the same version number, is not the same step.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};

/// Sets the environment variable `variable`, for the crate that is built, to a hash of all files in
/// `folders`.
pub fn set(variable: &str, folders: &[&str]) -> std::io::Result<()> {
    let mut files = Vec::new();
    for folder in folders {
        println!("cargo:rerun-if-changed={folder}");
        collect(Path::new(folder), &mut files)?;
    }
    files.sort();
    let mut hasher = DefaultHasher::new();
    for file in files {
        file.hash(&mut hasher);
        fs::read(file)?.hash(&mut hasher);
    }
    println!("cargo:rustc-env={variable}={:016x}", hasher.finish());
    Ok(())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}
