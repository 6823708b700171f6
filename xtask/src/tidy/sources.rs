//! Reads the Rust files in a directory tree: the packages, the files in each package, and the
//! purpose of each line.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};

use proc_macro2::extra::invalidate_current_thread_spans;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use walkdir::WalkDir;

use super::lexical::Text;
use crate::Failure;

/// Purpose of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    Product,
    Test,
    Generated,
}

/// Directories that contain test code, at any level of the tree.
const TEST_FOLDERS: &[&str] = &[
    "tests", "test", "testing", "testkit", "benches", "examples", "fuzz",
];

/// A package, or a source directory without a manifest.
pub(crate) struct Package {
    /// Directory relative to the root of the tree. For the root package, this is the name of the
    /// tree.
    pub(crate) name: String,
    pub(crate) manifest: toml::Table,
    pub(crate) sources: Vec<Source>,
    /// Files that can't be parsed, and the error for each.
    pub(crate) unreadable: Vec<String>,
}

/// A parsed source file in a package.
pub(crate) struct Source {
    /// Path relative to the root of the tree.
    pub(crate) path: PathBuf,
    /// Module path, if this file is part of a crate in its package.
    pub(crate) module: Option<Module>,
    pub(crate) text: Text,
    pub(crate) syntax: syn::File,
    purpose: Purpose,
    /// Lines with test code in a product file.
    tests: Vec<RangeInclusive<usize>>,
}

/// A module in a crate.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Module {
    /// Path of the crate root, relative to the root of the tree.
    pub(crate) root: PathBuf,
    /// Module path, starting at the crate root.
    pub(crate) path: Vec<String>,
}

impl Source {
    /// Returns the purpose of a line. Line numbers start at 1.
    pub(crate) fn purpose_of(&self, line: usize) -> Purpose {
        if self.tests.iter().any(|range| range.contains(&line)) {
            return Purpose::Test;
        }
        self.purpose
    }

    /// Returns the purpose of this file, ignoring any tests it contains.
    pub(crate) fn purpose(&self) -> Purpose {
        self.purpose
    }
}

/// Reads all source files in a directory. If a file is not valid Rust, such as a template, it's
/// returned as an error message.
pub(crate) fn read(root: &Path) -> Result<Vec<Package>, Failure> {
    // Free the spans of previous trees, because they only use memory.
    invalidate_current_thread_spans();
    let (mut manifests, mut files) = (BTreeMap::new(), Vec::new());
    for path in paths(root)? {
        if path.file_name().is_some_and(|name| name == "Cargo.toml") {
            let manifest: toml::Table = fs::read_to_string(root.join(&path))?
                .parse()
                .map_err(|e| format!("{}: {e}", path.display()))?;
            if manifest.contains_key("package") {
                manifests.insert(path.parent().unwrap_or(&path).to_owned(), manifest);
            }
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    let mut owned = BTreeMap::<PathBuf, Vec<PathBuf>>::new();
    for file in files {
        // Use the nearest parent directory with a manifest, because packages can be nested.
        let owner = file.ancestors().find(|a| manifests.contains_key(*a));
        let owner = owner.unwrap_or(Path::new("")).to_owned();
        owned.entry(owner).or_default().push(file);
    }
    let own_name = fs::canonicalize(root)?;
    let own_name = own_name.file_name().unwrap_or_default().to_string_lossy();
    let mut packages = Vec::new();
    for (folder, files) in owned {
        let name = match folder.to_string_lossy() {
            name if name.is_empty() => own_name.to_string(),
            name => name.to_string(),
        };
        let manifest = manifests.remove(&folder).unwrap_or_default();
        let reader = Reader::new(root, &folder, &manifest, &files);
        let (sources, unreadable) = reader.read(files.clone());
        packages.push(Package {
            name,
            manifest,
            sources,
            unreadable,
        });
    }
    Ok(packages)
}

/// Returns all files in a tree as relative paths. Hidden files and build output are skipped.
pub(crate) fn paths(root: &Path) -> Result<Vec<PathBuf>, Failure> {
    let is_wanted = |entry: &walkdir::DirEntry| {
        let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
        let is_output = entry.path().join("CACHEDIR.TAG").exists();
        entry.depth() == 0 || !(is_hidden || is_output)
    };
    let mut paths = Vec::new();
    for entry in WalkDir::new(root)
        .sort_by_file_name()
        .into_iter()
        .filter_entry(is_wanted)
    {
        let entry = entry?;
        if entry.file_type().is_file() {
            paths.push(entry.path().strip_prefix(root)?.to_owned());
        }
    }
    Ok(paths)
}

/// Reads the files of a package. For crates we follow `mod` items, and then read all remaining
/// files.
struct Reader<'a> {
    root: &'a Path,
    own: BTreeSet<&'a Path>,
    /// Crate root files, which we read first.
    crates: Vec<PathBuf>,
    is_for_tests: bool,
    done: BTreeMap<PathBuf, Source>,
    unreadable: BTreeMap<PathBuf, String>,
}

impl<'a> Reader<'a> {
    fn new(root: &'a Path, folder: &Path, manifest: &toml::Table, files: &'a [PathBuf]) -> Self {
        let own: BTreeSet<_> = files.iter().map(PathBuf::as_path).collect();
        let stated = ["lib", "bin"].iter().filter_map(|key| manifest.get(*key));
        let stated = stated.flat_map(|value| match value {
            toml::Value::Array(values) => values.as_slice(),
            value => std::slice::from_ref(value),
        });
        let stated = stated.filter_map(|table| table.get("path")?.as_str());
        let mut crates: Vec<_> = stated
            .chain(["src/lib.rs", "src/main.rs", "build.rs", "lib.rs", "main.rs"])
            .map(|path| folder.join(path))
            .collect();
        let programs = folder.join("src/bin");
        crates.extend(files.iter().filter_map(|file| {
            let below = file.strip_prefix(&programs).ok()?;
            let is_root = below.components().count() == 1 || below.ends_with("main.rs");
            is_root.then(|| file.clone())
        }));
        crates.retain(|path| own.contains(path.as_path()));
        Self {
            root,
            own,
            crates,
            is_for_tests: is_in_test_folder(folder),
            done: BTreeMap::new(),
            unreadable: BTreeMap::new(),
        }
    }

    /// Reads all files. Also returns a message for each file that can't be read.
    fn read(mut self, files: Vec<PathBuf>) -> (Vec<Source>, Vec<String>) {
        for root in std::mem::take(&mut self.crates) {
            let module = Module {
                root: root.clone(),
                path: Vec::new(),
            };
            self.follow(&root, module, self.is_for_tests, true);
        }
        // Read the remaining files that are not part of any `mod` item: tests, benchmarks, and
        // modules only declared in macros.
        for path in files {
            if !self.done.contains_key(&path) {
                let is_test = self.is_for_tests || is_in_test_folder(&path);
                self.read_file(&path, None, is_test);
            }
        }
        let message = |(path, why): (PathBuf, String)| format!("{}: {why}", path.display());
        let unreadable = self.unreadable.into_iter().map(message).collect();
        (self.done.into_values().collect(), unreadable)
    }

    /// Reads the file of a module and the modules declared in it.
    fn follow(&mut self, path: &Path, module: Module, is_test: bool, is_root: bool) {
        // A file belongs to the first module that includes it. Another crate in the same package
        // may use the same file again.
        if self.done.contains_key(path) {
            return;
        }
        let Some(declared) = self.read_file(path, Some(module.clone()), is_test) else {
            return;
        };
        let folder = path.parent().unwrap_or(Path::new(""));
        let stem = path.file_stem().unwrap_or_default();
        // We use the same rules as rustc: child modules of `mod.rs` or a crate root are in the same
        // directory, but for any other file they are in a directory with the file's name.
        let inner = if is_root || stem == "mod" {
            folder.to_owned()
        } else {
            folder.join(stem)
        };
        for Declared {
            names,
            file,
            is_test: is_test_here,
        } in declared
        {
            let (name, nesting) = names.split_last().expect("a module has a name");
            let below = nesting.iter().fold(inner.clone(), |at, n| at.join(n));
            let candidates = match &file {
                // A `path` attribute is relative to the file's directory or, if used in an inline
                // module, to the directory for this module.
                Some(file) if nesting.is_empty() => vec![normal(&folder.join(file))],
                Some(file) => vec![normal(&below.join(file))],
                None => vec![
                    below.join(format!("{name}.rs")),
                    below.join(name).join("mod.rs"),
                ],
            };
            let mut module = module.clone();
            module.path.extend(names);
            if let Some(file) = candidates.iter().find(|c| self.own.contains(c.as_path())) {
                self.follow(file, module, is_test || is_test_here, false);
            }
        }
    }

    /// Reads a single file and returns the modules declared in it.
    fn read_file(
        &mut self,
        path: &Path,
        module: Option<Module>,
        is_test: bool,
    ) -> Option<Vec<Declared>> {
        let (source, text, syntax) = match parsed(&self.root.join(path)) {
            Ok(parsed) => parsed,
            Err(e) => {
                self.unreadable.insert(path.to_owned(), e.to_string());
                return None;
            }
        };
        // We need to use the syntax, because `#[cfg(test)]` can be used for a module, a function or
        // a single import.
        let mut items = Items::default();
        items.visit_file(&syntax);
        let purpose = match (is_generated(path, &source), is_test) {
            (true, _) => Purpose::Generated,
            (false, true) => Purpose::Test,
            (false, false) => Purpose::Product,
        };
        let source = Source {
            path: path.to_owned(),
            module,
            text,
            syntax,
            purpose,
            tests: items.tests,
        };
        self.done.insert(path.to_owned(), source);
        Some(items.declared)
    }
}

/// Returns the text, tokens and syntax tree of a file.
fn parsed(path: &Path) -> Result<(String, Text, syn::File), Failure> {
    let source = fs::read_to_string(path)?;
    let plain = source.trim_start_matches('\u{feff}');
    let (text, tokens) = Text::new(plain)?;
    let syntax = syn::parse2(tokens)?;
    Ok((source, text, syntax))
}

/// A module declared in this file but defined in another file.
struct Declared {
    /// Path of the module within this file, including its own name.
    names: Vec<String>,
    /// Value of the `path` attribute, if any.
    file: Option<String>,
    is_test: bool,
}

/// Test code and modules that are declared in a file.
#[derive(Default)]
struct Items {
    tests: Vec<RangeInclusive<usize>>,
    declared: Vec<Declared>,
    /// Modules that contain the current item.
    names: Vec<String>,
    is_in_test: bool,
}

impl Items {
    /// Visits an item. If its attributes are for tests, the lines are added as test code.
    fn enter(
        &mut self,
        attributes: &[syn::Attribute],
        lines: RangeInclusive<usize>,
        visit: impl FnOnce(&mut Self),
    ) {
        let before = self.is_in_test;
        if !before && attributes.iter().any(is_for_tests) {
            self.is_in_test = true;
            self.tests.push(lines);
        }
        visit(self);
        self.is_in_test = before;
    }
}

impl<'ast> Visit<'ast> for Items {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        self.enter(attributes(item), lines(item), |items| {
            visit::visit_item(items, item);
        });
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.enter(&item.attrs, lines(item), |items| {
            visit::visit_impl_item_fn(items, item);
        });
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.names.push(item.ident.to_string());
        if item.content.is_none() {
            let file = item.attrs.iter().find_map(named_file);
            self.declared.push(Declared {
                names: self.names.clone(),
                file,
                is_test: self.is_in_test,
            });
        }
        visit::visit_item_mod(self, item);
        self.names.pop();
    }
}

/// Returns the value of a `path` attribute.
fn named_file(attribute: &syn::Attribute) -> Option<String> {
    let value = &attribute.meta.require_name_value().ok()?.value;
    match value {
        syn::Expr::Lit(syn::ExprLit {
            lit: syn::Lit::Str(file),
            ..
        }) if attribute.path().is_ident("path") => Some(file.value()),
        _ => None,
    }
}

/// Returns the lines of a node, including its attributes and documentation.
pub(crate) fn lines(node: &impl Spanned) -> RangeInclusive<usize> {
    let span = node.span();
    span.start().line..=span.end().line
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    use syn::Item;
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Checks for any variant of `#[test]`, and for `#[cfg(test)]`. A condition that contains `not`
/// could be true for the product.
fn is_for_tests(attribute: &syn::Attribute) -> bool {
    let path = attribute.path();
    if path
        .segments
        .last()
        .is_some_and(|last| last.ident == "test")
    {
        return true;
    }
    let condition = match &attribute.meta {
        syn::Meta::List(list) if path.is_ident("cfg") => list.tokens.to_string(),
        _ => return false,
    };
    let has = |name| {
        let mut words = condition.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        words.any(|word| word == name)
    };
    has("test") && !has("not")
}

fn is_in_test_folder(path: &Path) -> bool {
    let parts = path.components().map(Component::as_os_str);
    let mut parts = parts.filter_map(|part| part.to_str());
    parts.any(|part| TEST_FOLDERS.contains(&part))
}

fn is_generated(path: &Path, source: &str) -> bool {
    let head = source.lines().take(3).collect::<String>().to_lowercase();
    let is_in_folder = path.components().any(|c| c.as_os_str() == "generated");
    is_in_folder
        || ["generated by", "@generated"]
            .iter()
            .any(|mark| head.contains(mark))
}

/// Returns a path without `..` components.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::sh::Scratch;

    /// Creates a tree with these files and reads it.
    pub(crate) fn tree(name: &str, files: &[(&str, &str)]) -> Vec<Package> {
        let scratch = Scratch::new(name).unwrap();
        for (path, text) in files {
            let path = scratch.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        read(scratch.path()).unwrap()
    }

    #[test]
    fn non_rust_files_are_reported() {
        let packages = tree(
            "tidy-unreadable",
            &[("src/lib.rs", "mod one;\n"), ("src/one.rs", "fn {{name}}")],
        );
        let [package] = &packages[..] else {
            panic!("{} packages", packages.len());
        };
        assert_eq!(package.sources.len(), 1);
        let [message] = &package.unreadable[..] else {
            panic!("{:?}", package.unreadable);
        };
        assert!(message.starts_with("src/one.rs: "), "{message}");
    }

    #[test]
    fn files_are_read_along_their_modules() {
        let manifest = "[package]\nname = \"a\"\n";
        let packages = tree(
            "tidy-sources",
            &[
                ("Cargo.toml", manifest),
                (
                    "src/lib.rs",
                    "mod one;\n#[cfg(test)]\nmod checks;\n#[path = \"odd.rs\"]\nmod two;\n",
                ),
                ("src/one/mod.rs", "mod inner;\nmod inline { mod deep; }\n"),
                (
                    "src/one/inner.rs",
                    "fn f() {}\n#[cfg(test)]\nmod tests {\n    #[test]\n    fn g() {}\n}\n",
                ),
                ("src/one/inline/deep.rs", "// @generated\n"),
                ("src/odd.rs", ""),
                ("src/checks.rs", ""),
                ("tests/a.rs", ""),
                (".build/x.rs", ""),
                ("other/Cargo.toml", manifest),
                ("other/main.rs", "#[cfg(not(test))]\nfn f() {}\n"),
            ],
        );
        let shown = |package: &Package| -> Vec<_> {
            let sources = package.sources.iter();
            let shown = sources.map(|s| {
                let module = s.module.as_ref().map(|module| module.path.join("::"));
                (s.path.to_str().unwrap().to_owned(), module, s.purpose)
            });
            shown.collect()
        };
        use Purpose::{Generated, Product, Test};
        let expected = |path: &str, module: Option<&str>, purpose| {
            (path.to_owned(), module.map(str::to_owned), purpose)
        };
        assert_eq!(
            shown(&packages[0]),
            [
                expected("src/checks.rs", Some("checks"), Test),
                expected("src/lib.rs", Some(""), Product),
                expected("src/odd.rs", Some("two"), Product),
                expected(
                    "src/one/inline/deep.rs",
                    Some("one::inline::deep"),
                    Generated
                ),
                expected("src/one/inner.rs", Some("one::inner"), Product),
                expected("src/one/mod.rs", Some("one"), Product),
                expected("tests/a.rs", None, Test),
            ]
        );
        assert_eq!(packages[1].name, "other");
        assert_eq!(shown(&packages[1])[0].2, Product);
        let inner = &packages[0].sources[4];
        assert_eq!(inner.purpose_of(1), Product);
        assert_eq!(inner.purpose_of(2), Test);
        assert_eq!(inner.purpose_of(6), Test);
        assert_eq!(packages[1].sources[0].purpose_of(2), Product);
    }
}
