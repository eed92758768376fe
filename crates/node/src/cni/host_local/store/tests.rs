use super::*;
use crate::cni::host_local::scratch::Scratch;

fn ip(text: &str) -> Addr {
    golang::parse_ip(text).unwrap()
}

fn owner(id: &str) -> Owner {
    Owner::new(id.as_bytes(), b"eth0")
}

#[test]
fn files_are_host_locals() {
    let scratch = Scratch::new("format");
    let dir = dir(scratch.path(), "net");
    let mut store = Store::open(&dir).unwrap();
    assert_eq!(store.reserve(&owner("a"), ip("fd00::10"), 0), Ok(true));
    assert_eq!(store.reserve(&owner("b"), ip("fd00::10"), 0), Ok(false));
    assert_eq!(store.reserve(&owner("b"), ip("fd00::2"), 0), Ok(true));
    assert_eq!(fs::read(dir.join("fd00::10")).unwrap(), b"a\r\neth0");
    assert_eq!(
        fs::read(dir.join("last_reserved_ip.0")).unwrap(),
        b"fd00::2",
        "shorter than the one before"
    );
    assert_eq!(store.cursor(0), Some(ip("fd00::2")));
    assert_eq!(store.cursor(1), None);
}

#[test]
fn owners_are_found_as_a_walk_finds_them() {
    let scratch = Scratch::new("owners");
    let dir = dir(scratch.path(), "net");
    fs::create_dir_all(dir.join("in")).unwrap();
    for (name, content) in [
        ("10.0.0.3", "a\r\neth0"),
        ("10.0.0.20", "\n a\r\neth0 \u{a0}\n"),
        ("10.0.0.4", "a"),
        ("10.0.0.5", "a\r\neth1"),
        ("in/10.0.0.6", "a\r\neth0"),
        ("x", "a\r\neth0"),
        ("lock", "a"),
        ("last_reserved_ip.0", "a"),
    ] {
        fs::write(dir.join(name), content).unwrap();
    }
    let mut store = Store::open(&dir).unwrap();
    let found = ["10.0.0.20", "10.0.0.3", "10.0.0.4", "10.0.0.6"].map(ip);
    assert_eq!(store.addresses(&owner("a")), found);
    assert!(store.has_any(&owner("a")) && !store.has_any(&owner("b")));
    store.release(&owner("a"));
    assert_eq!(store.addresses(&owner("a")), [ip("10.0.0.4")]);
    assert!(!dir.join("x").exists() && dir.join("lock").exists());
    store.release(&owner("a"));
    assert!(!store.has_any(&owner("a")));
    assert!(dir.join("10.0.0.5").exists());
}

/// Makes a file older than a tick of the kernel's clock.
fn settle(path: &Path) {
    let past = std::time::SystemTime::now() - std::time::Duration::from_secs(60);
    File::open(path).unwrap().set_modified(past).unwrap();
}

/// Gives 10.0.0.2 to `a`, and notes it.
fn noted_with_one(dir: &Path) {
    let mut store = Store::open(dir).unwrap();
    store.reserve(&owner("a"), ip("10.0.0.2"), 0).unwrap();
    store.note();
}

/// Opens, and notes what was found.
fn noted(dir: &Path) -> Store {
    let mut store = Store::open(dir).unwrap();
    store.note();
    store
}

#[test]
fn a_note_saves_reading_and_hides_nothing() {
    let scratch = Scratch::new("note");
    let dir = dir(scratch.path(), "net");
    noted_with_one(&dir);
    settle(&dir.join("10.0.0.2"));
    drop(noted(&dir));
    let store = Store::open(&dir).unwrap();
    assert!(!store.changed, "the note was taken");
    drop(store);
    // Written over in place, which the seal does not tell; once more within a tick, and older.
    for (id, old) in [("b", false), ("c", false), ("d", true)] {
        fs::write(dir.join("10.0.0.2"), format!("{id}\r\neth0")).unwrap();
        if old {
            settle(&dir.join("10.0.0.2"));
        }
        let store = noted(&dir);
        assert!(
            store.has_any(&owner(id)) && !store.has_any(&owner("a")),
            "{id}"
        );
    }
    fs::write(dir.join("10.0.0.3"), "e\r\neth0").unwrap();
    let store = Store::open(&dir).unwrap();
    assert!(store.has_any(&owner("d")) && store.has_any(&owner("e")));
}

#[test]
fn a_file_written_over_in_the_oldest_format_is_released() {
    let scratch = Scratch::new("over");
    let dir = dir(scratch.path(), "net");
    noted_with_one(&dir);
    fs::write(dir.join("10.0.0.2"), "a").unwrap();
    let mut store = Store::open(&dir).unwrap();
    store.release(&owner("a"));
    assert!(!dir.join("10.0.0.2").exists());
}

#[test]
fn what_people_do_without_the_lock_during_a_call_is_seen_by_the_next() {
    let scratch = Scratch::new("hand");
    let dir = dir(scratch.path(), "net");
    noted_with_one(&dir);
    let mut store = Store::open(&dir).unwrap();
    fs::remove_file(dir.join("10.0.0.2")).unwrap();
    fs::write(dir.join("10.0.0.9"), "c\r\neth0").unwrap();
    store.reserve(&owner("b"), ip("10.0.0.3"), 0).unwrap();
    store.note();
    drop(store);
    let mut store = Store::open(&dir).unwrap();
    assert_eq!(store.reserve(&owner("d"), ip("10.0.0.2"), 0), Ok(true));
    assert!(store.has_any(&owner("c")), "an owner by hand");
}

#[test]
fn nothing_is_written_through_symbolic_links() {
    let scratch = Scratch::new("links");
    let root = Path::new(scratch.path());
    let victim = root.join("victim");
    fs::write(&victim, "kept").unwrap();
    let link = |path: &Path| std::os::unix::fs::symlink(&victim, path).unwrap();
    let dir = dir(scratch.path(), "net");
    drop(Store::open(&dir).unwrap());
    link(&dir.join("last_reserved_ip.0"));
    link(&dir.join("10.0.0.3"));
    let mut store = Store::open(&dir).unwrap();
    let told = store.reserve(&owner("a"), ip("10.0.0.2"), 0).unwrap_err();
    assert!(
        told.contains("last_reserved_ip.0: it is a symbolic link"),
        "{told}"
    );
    assert!(told.ends_with("remove it"), "{told}");
    assert!(!dir.join("10.0.0.2").exists(), "the address is free");
    assert_eq!(store.reserve(&owner("a"), ip("10.0.0.3"), 1), Ok(false));
    drop(store);
    fs::remove_file(dir.join("last_reserved_ip.0")).unwrap();
    fs::remove_file(dir.join("10.0.0.3")).unwrap();
    link(&root.join(".net.index"));
    drop(noted(&dir));
    assert_eq!(fs::read(&victim).unwrap(), b"kept");
    fs::remove_file(&victim).unwrap();
    fs::remove_file(dir.join("lock")).unwrap();
    link(&dir.join("lock"));
    let told = Store::open(&dir).err().unwrap();
    assert!(told.contains("lock: it is a symbolic link"), "{told}");
    assert!(!victim.exists(), "nothing is made where it leads");
}

#[test]
fn garbage_is_what_nobody_valid_owns() {
    let scratch = Scratch::new("collect");
    let dir = dir(scratch.path(), "net");
    let mut store = Store::open(&dir).unwrap();
    for (name, content) in [
        ("10.0.0.2", "a\r\neth0"),
        ("10.0.0.3", "a\r\neth1"),
        ("10.0.0.4", "a"),
        ("10.0.0.5", "b"),
        ("10.0.0.6", ""),
        ("notes", "b"),
    ] {
        fs::write(dir.join(name), content).unwrap();
    }
    drop(store);
    store = Store::open(&dir).unwrap();
    store.collect(&[(b"a".to_vec(), b"eth0".to_vec())]);
    let left = store.files.names().map(golang::text);
    assert_eq!(left.collect::<Vec<_>>(), ["10.0.0.2", "10.0.0.4", "notes"]);
    store.collect(&[]);
    assert_eq!(store.files.len(), 1);
}

#[test]
fn an_address_whose_cursor_cannot_be_written_stays_free() {
    let scratch = Scratch::new("cursor");
    let dir = dir(scratch.path(), "net");
    fs::create_dir_all(dir.join("last_reserved_ip.0")).unwrap();
    let mut store = Store::open(&dir).unwrap();
    let error = store.reserve(&owner("a"), ip("10.0.0.2"), 0).unwrap_err();
    let path = dir.join("last_reserved_ip.0");
    assert_eq!(error, format!("open {}: is a directory", path.display()));
    assert!(!dir.join("10.0.0.2").exists() && !store.has_any(&owner("a")));
    assert_eq!(store.reserve(&owner("a"), ip("10.0.0.2"), 1), Ok(true));
}

#[test]
fn what_cannot_be_made_is_named() {
    let scratch = Scratch::new("cannot");
    fs::write(Path::new(scratch.path()).join("file"), "").unwrap();
    let below = dir(&format!("{}/file", scratch.path()), "net");
    let error = Store::open(&below).err().unwrap();
    let expected = format!("mkdir {}/file: not a directory", scratch.path());
    assert_eq!(error, expected);
    fs::create_dir_all(dir(scratch.path(), "net").join("lock")).unwrap();
    let error = Store::open(&dir(scratch.path(), "net")).err();
    assert_eq!(error.as_deref(), Some("is a directory"));
}
