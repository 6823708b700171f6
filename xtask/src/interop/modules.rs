//! Builds kernel modules that are not included in Debian's kernel, using the Debian sources and
//! headers for the same kernel. Each module is only built once.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::case::Case;
use super::kernel::{Kernel, PrivateApt};
use crate::packages::cache;
use crate::{Failure, cases, root, sh};

/// A module required by some of the cases, from `xtask/cases/modules.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Module {
    pub(crate) name: String,
    directory: String,
    variable: String,
    word: String,
    /// Additional source files, in [`FILES`].
    #[serde(default)]
    files: Vec<String>,
    /// Source changes: file, old text and new text.
    edits: Vec<(String, String, String)>,
}

/// Directory with additional source files for modules.
const FILES: &str = "tests/vm/modules";

pub(crate) fn modules() -> Vec<Module> {
    cases::read(include_str!("../../cases/modules.toml"))
}

impl Module {
    pub(crate) fn is_for(&self, case: &Case) -> bool {
        case.text.contains(&self.word)
    }

    /// Returns all source changes.
    fn stamp(&self) -> Result<String, Failure> {
        let edits = self.edits.iter().map(|edit| Ok(format!("{edit:?}\n")));
        let files = self.files.iter();
        let files = files.map(|file| fs::read_to_string(root().join(FILES).join(file)));
        Ok(edits.chain(files).collect::<Result<_, _>>()?)
    }

    /// Builds the module and installs it in the kernel's module directory, if it doesn't exist.
    pub(crate) fn ensure(&self, kernel: &Kernel) -> Result<(), Failure> {
        let module = format!("updates/{}.ko", self.name);
        let module = kernel.modules().join(module);
        // If the existing module was built with other source changes, build it again.
        let (edits, stamp) = (self.stamp()?, module.with_extension("edits"));
        if module.exists() && fs::read_to_string(&stamp).unwrap_or_default() == edits {
            return Ok(());
        }
        println!("building {} for Linux {}", self.name, kernel.version);
        let directory = cache().join(format!("{}-{}", self.name, std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        let apt = PrivateApt::new()?;
        for package in packages(&kernel.version) {
            let archive = apt.download(&package)?;
            sh::output(sh::cmd("dpkg", ["-x"]).arg(&archive).arg(&directory))?;
            fs::remove_file(&archive)?;
        }
        let sources = self.unpack_sources(kernel, &directory)?;
        let mut build = sh::cmd("bash", [root().join("tests/vm/module.sh")]);
        build.args([&directory, &sources, &kernel.root]);
        sh::output(build.args([&self.name, &self.variable, &kernel.version]))?;
        fs::write(&stamp, edits)?;
        fs::remove_dir_all(&directory)?;
        Ok(())
    }

    /// Unpacks and changes the sources, and returns the module's directory.
    fn unpack_sources(&self, kernel: &Kernel, directory: &Path) -> Result<PathBuf, Failure> {
        let name = format!("linux-source-{}", series(&kernel.version));
        let packed = directory.join(format!("usr/src/{name}.tar.xz"));
        let sources = format!("{name}/{}", self.directory);
        let mut tar = sh::cmd("tar", ["-xJf"]);
        tar.arg(&packed).arg("-C").arg(directory).arg(&sources);
        sh::output(&mut tar)?;
        let sources = directory.join(sources);
        for file in &self.files {
            fs::copy(root().join(FILES).join(file), sources.join(file))?;
        }
        for (file, what, by) in &self.edits {
            let path = sources.join(file);
            let text = fs::read_to_string(&path)?;
            if !text.contains(what) {
                return Err(format!("{file} of {name} has no {what:?}").into());
            }
            fs::write(&path, text.replace(what, by))?;
        }
        Ok(sources)
    }
}

/// Returns the packages with the sources and the headers of a kernel.
fn packages(version: &str) -> [String; 4] {
    let flavour = version.rsplit('-').next().unwrap_or_default();
    let build = version.trim_end_matches(flavour).trim_end_matches('-');
    [
        format!("linux-source-{}", series(version)),
        format!("linux-headers-{version}"),
        format!("linux-headers-{build}-common"),
        format!("linux-kbuild-{build}"),
    ]
}

/// Returns the source version for a kernel, for example `6.12` for `6.12.95+deb12-amd64`.
fn series(version: &str) -> String {
    let parts: Vec<&str> = version.split('.').take(2).collect();
    parts.join(".")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interop::case;

    #[test]
    fn sources_are_named_by_their_series() {
        assert_eq!(series("6.12.95+deb12-amd64"), "6.12");
    }

    #[test]
    fn module_is_used_by_case() {
        let cases = case::load(&[], false).unwrap();
        for module in modules() {
            let count = cases.iter().filter(|case| module.is_for(case)).count();
            assert!(count > 0, "{}", module.name);
        }
        // These cases use the module in a common script.
        let modules = modules();
        let module = modules.iter().find(|m| m.name == "sg_pi").unwrap();
        assert!(
            cases
                .iter()
                .filter(|case| case.name.starts_with("pi-debug"))
                .all(|case| module.is_for(case))
        );
    }
}
