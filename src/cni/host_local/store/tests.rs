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

#[test]
fn a_note_saves_reading_until_someone_else_changes_the_directory() {
    let scratch = Scratch::new("note");
    let dir = dir(scratch.path(), "net");
    let mut store = Store::open(&dir).unwrap();
    store.reserve(&owner("a"), ip("10.0.0.2"), 0).unwrap();
    store.note();
    drop(store);
    // Written over in place: the one change that the seal does not tell.
    fs::write(dir.join("10.0.0.2"), "b\r\neth0").unwrap();
    let store = Store::open(&dir).unwrap();
    assert!(!store.changed, "the note was taken");
    assert!(!store.has_any(&owner("a")), "hits are looked up");
    drop(store);
    fs::write(dir.join("10.0.0.3"), "c\r\neth0").unwrap();
    let store = Store::open(&dir).unwrap();
    assert!(store.changed && store.has_any(&owner("b")) && store.has_any(&owner("c")));
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
