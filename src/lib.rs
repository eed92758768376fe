//! Cadastre
