"""Traces that other programs write: does a file keep the schema, and do two tell the same?"""
